#include "floor.cuh"
#include "stamp.cuh"
