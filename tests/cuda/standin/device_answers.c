// What the stand-in answers about its device, an H100, and what kernels and libraries do on it: nothing. See README.md.
#define _GNU_SOURCE
#include "standin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME "NVIDIA H100 80GB HBM3"
#define DRIVER 13000
#define CUBLASLT 130101

static void *new_handle(void) { return calloc(1, 512); }

// The device.
int cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
int cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
int cudaDriverGetVersion(int *version) { return *version = DRIVER, cudaSuccess; }
int cudaDeviceCanAccessPeer(int *can, int device, int peer) { return *can = 0, cudaSuccess; }
int cudaDeviceGetPCIBusId(char *id, int length, int device) {
  snprintf(id, length, "0000:00:00.0");
  return cudaSuccess;
}
int cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
  memset(found, 0, sizeof *found);
  strcpy(found->name, NAME);
  found->totalGlobalMem = standin_bytes();
  found->sharedMemPerBlock = 49152;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->warpSize = 32;
  found->memPitch = 2147483647;
  found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->totalConstMem = 65536;
  found->major = 9;
  found->textureAlignment = 512;
  found->multiProcessorCount = 132;
  found->unifiedAddressing = found->managedMemory = found->concurrentKernels = 1;
  found->memoryBusWidth = 5120;
  found->l2CacheSize = 52428800;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxBlocksPerMultiProcessor = 32;
  found->sharedMemPerMultiprocessor = 233472;
  found->sharedMemPerBlockOptin = 232448;
  found->asyncEngineCount = 3;
  return cudaSuccess;
}
// Older releases of torch ask by this name.
int cudaGetDeviceProperties_v2(struct cudaDeviceProp *found, int device) {
  return cudaGetDeviceProperties(found, device);
}
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrL2CacheSize: *value = 52428800; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
    default: *value = 1;
  }
  return cudaSuccess;
}

// Streams, beside what they copy: none is captured.
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
int cudaStreamGetPriority(void *stream, int *priority) { return *priority = 0, cudaSuccess; }
int cudaStreamIsCapturing(void *stream, int *status) { return *status = 0, cudaSuccess; }
int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id) {
  *status = 0;
  if (id) *id = 0;
  return cudaSuccess;
}
int cudaStreamGetCaptureInfo_v2(void *stream, int *status, unsigned long long *id) {
  return cudaStreamGetCaptureInfo(stream, status, id);
}
int cudaThreadExchangeStreamCaptureMode(int *mode) { return *mode = 0, cudaSuccess; }

// Kernels.
int cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 64;
  found->ptxVersion = found->binaryVersion = 90;
  found->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t shared) {
  return *blocks = 2, cudaSuccess;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads,
                                                           size_t shared, unsigned flags) {
  return *blocks = 2, cudaSuccess;
}
int cudaGetSymbolAddress(void **address, const void *symbol) { return *address = new_handle(), cudaSuccess; }

// The driver, which torch and Triton call by name.
int cuInit(unsigned flags) { return cudaSuccess; }
int cuDriverGetVersion(int *version) { return *version = DRIVER, cudaSuccess; }
int cuDeviceGetCount(int *count) { return *count = 1, cudaSuccess; }
int cuDeviceGet(int *device, int number) { return *device = number, cudaSuccess; }
int cuDeviceGetName(char *name, int length, int device) {
  snprintf(name, length, NAME);
  return cudaSuccess;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { return *bytes = standin_bytes(), cudaSuccess; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  return cudaDeviceGetAttribute(value, attribute, device);
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return cudaSuccess;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = new_handle(), cudaSuccess; }
int cuCtxGetCurrent(void **context) {
  static int only;
  return *context = &only, cudaSuccess;
}
int cuCtxGetLimit(size_t *value, int limit) { return *value = 1 << 20, cudaSuccess; }
int cuModuleLoadData(void **module, const void *image) { return *module = new_handle(), cudaSuccess; }
int cuModuleGetFunction(void **kernel, void *module, const char *name) { return *kernel = new_handle(), cudaSuccess; }
int cuModuleGetGlobal_v2(void **address, size_t *bytes, void *module, const char *name) {
  *address = new_handle();
  if (bytes) *bytes = 8;
  return cudaSuccess;
}
int cuFuncGetAttribute(int *value, int attribute, void *kernel) {
  // 0 asks for threads in a block, 4 for registers.
  return *value = attribute == 4 ? 64 : (attribute == 0 ? 1024 : 0), cudaSuccess;
}
int cuOccupancyMaxActiveClusters(int *clusters, void *kernel, void *config) { return *clusters = 8, cudaSuccess; }
int cuPointerGetAttribute(void *value, int attribute, unsigned long long address) {
  return *(unsigned long long *)value = address, cudaSuccess;
}
int cuGetErrorString(int error, const char **text) { return *text = "an error of the CUDA stand-in", cudaSuccess; }
static int nothing(void) { return cudaSuccess; }
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                     int *status) {
  *function = strcmp(name, "cuDevicePrimaryCtxGetState") ? (void *)nothing : (void *)cuDevicePrimaryCtxGetState;
  if (status) *status = 0;
  return standin_called(name);
}
int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *status) {
  return cudaGetDriverEntryPointByVersion(name, function, DRIVER, flags, status);
}

// cuBLAS: products are kernels, which do nothing.
int cublasCreate_v2(void **handle) { return *handle = new_handle(), cudaSuccess; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0, cudaSuccess; }
int cublasGetMathMode(void *handle, int *mode) { return *mode = 0, cudaSuccess; }
size_t cublasLtGetVersion(void) { return CUBLASLT; }
int cublasLtMatmulDescCreate(void **description) { return *description = new_handle(), cudaSuccess; }
int cublasLtMatmulPreferenceCreate(void **preference) { return *preference = new_handle(), cudaSuccess; }
int cublasLtMatrixLayoutCreate(void **layout) { return *layout = new_handle(), cudaSuccess; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int asked, void *results, int *found) {
  // sizeof(cublasLtMatmulHeuristicResult_t); one algorithm that needs no workspace.
  memset(results, 0, 96);
  return *found = 1, cudaSuccess;
}
