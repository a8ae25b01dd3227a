#define SPARK_NUMBER 0
#include "../unit.cuh"
