#define SPARK_NUMBER 3
#include "../unit.cuh"
