#define SPARK_NUMBER 7
#include "../unit.cuh"
