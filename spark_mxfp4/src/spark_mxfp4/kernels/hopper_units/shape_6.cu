#define SPARK_NUMBER 6
#include "../unit.cuh"
