#define SPARK_NUMBER 1
#include "../unit.cuh"
