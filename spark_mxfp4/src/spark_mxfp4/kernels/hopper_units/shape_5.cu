#define SPARK_NUMBER 5
#include "../unit.cuh"
