#define SPARK_NUMBER 4
#include "../unit.cuh"
