// The wheels of the CUDA runtime lack NVIDIA's file of this name; plain C needs none of its macros.
#pragma once
#define __device_builtin__
#define __builtin_align__(size) __attribute__((aligned(size)))
#define __align__(size) __attribute__((aligned(size)))
#define __cudart_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __host__
#define __device__
#define __forceinline__ inline
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDART_CB
