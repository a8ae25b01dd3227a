#define SPARK_NUMBER 2
#include "../unit.cuh"
