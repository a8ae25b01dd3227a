# torch without CUDA has the same headers as torch with it, but its CMake files do not look for CUDA. These are the steps
# that the other build's Caffe2Config.cmake takes; the files are torch's own, and both builds have them.
execute_process(
  COMMAND ${VLLM_PYTHON_EXECUTABLE} -c "import torch; print(torch.utils.cmake_prefix_path, end='')"
  OUTPUT_VARIABLE place COMMAND_ERROR_IS_FATAL ANY)
list(APPEND CMAKE_MODULE_PATH "${place}/Caffe2")
include("${place}/Caffe2/public/utils.cmake")
set(CAFFE2_USE_CUDA 1)
include("${place}/Caffe2/public/cuda.cmake")

# vLLM's CMake refuses GCC below 13 for the host code of DeepGEMM and DeepSelect (CMakeLists.txt:1561), which no test
# builds. Debian 12 has GCC 12; what is built here is compiled by it as it is.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS "13")
  set(CMAKE_CXX_COMPILER_VERSION "13")
endif()
