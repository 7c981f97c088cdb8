# The CUDA half of the build: compiler, flags, libraries.
# Code for sm_80 and PTX for newer devices; the instructions only Hopper has need 90a. Set before the
# language is enabled, which would fill in a default of its own.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80 90a-real)
endif()
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know nvcc's flag
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
find_package(CUDAToolkit REQUIRED)
# Headers usable on the device call constexpr functions of the standard library.
target_compile_options(zipage_options INTERFACE
  "$<$<COMPILE_LANGUAGE:CUDA>:-lineinfo;--expt-relaxed-constexpr;-Xcompiler=-Wall>"
  "$<$<COMPILE_LANGUAGE:CUDA>:--Werror=default-stream-launch,cross-execution-space-call,reorder>")
