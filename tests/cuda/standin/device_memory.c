// Memory, streams and events of the stand-in. See README.md.
#define _GNU_SOURCE
#include "standin.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define MIB ((size_t)1 << 20)
#define GRANULE (2 * MIB)
// What a context takes of the device.
#define CONTEXT (512 * MIB)
#define H100_BYTES 85029158912ull

typedef struct {
  uintptr_t begin;
  size_t bytes;
  int on_device;
} Region;

typedef struct {
  void *target;
  const void *source;
  int value;
  size_t bytes;
} Copy;

// A stream that somebody made; the default stream is NULL and runs at once.
typedef struct {
  Copy *copies;
  int asked, ran, room;
} Stream;

typedef struct {
  Stream *stream;
  int asked;
} Event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Region *regions;
static int region_count, region_room;
static size_t used;
// Addresses grow, since torch's allocator takes the lower of two blocks that fit equally well.
static uintptr_t next_address = (uintptr_t)1 << 45;
static Stream **streams;
static int stream_count;

static int setting(const char *name) {
  const char *text = getenv(name);
  return text != NULL && strcmp(text, "0") != 0;
}

int standin_has_data(void) {
  static int known = -1;
  if (known < 0) known = setting("CUDA_STANDIN_DATA");
  return known;
}

int standin_called(const char *name) {
  static int tells = -1;
  if (tells < 0) tells = setting("CUDA_STANDIN_TRACE");
  if (tells) fprintf(stderr, "[cuda stand-in] %s\n", name);
  return 0;
}

size_t standin_bytes(void) {
  const char *text = getenv("CUDA_STANDIN_BYTES");
  return text ? strtoull(text, NULL, 10) : H100_BYTES;
}

size_t standin_used(void) { return used; }

static void add_region(void *begin, size_t bytes, int on_device) {
  if (region_count == region_room) {
    region_room = region_room ? 2 * region_room : 1024;
    regions = realloc(regions, region_room * sizeof(Region));
  }
  regions[region_count++] = (Region){(uintptr_t)begin, bytes, on_device};
}

static Region *find_region(const void *address) {
  for (int i = 0; i < region_count; i++)
    if ((uintptr_t)address - regions[i].begin < regions[i].bytes) return regions + i;
  return NULL;
}

static int on_device(const void *address) {
  pthread_mutex_lock(&lock);
  Region *region = find_region(address);
  int found = region != NULL && region->on_device;
  pthread_mutex_unlock(&lock);
  return found;
}

int cudaMalloc(void **address, size_t bytes) {
  size_t rounded = (bytes + GRANULE - 1) / GRANULE * GRANULE;
  int result = cudaErrorMemoryAllocation;
  pthread_mutex_lock(&lock);
  if (used + rounded <= standin_bytes() - CONTEXT) {
    int access = standin_has_data() ? PROT_READ | PROT_WRITE : PROT_NONE;
    void *found = mmap((void *)next_address, rounded, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found != MAP_FAILED) {
      *address = found;
      add_region(found, rounded, 1);
      used += rounded;
      next_address = (uintptr_t)found + rounded;
      result = cudaSuccess;
    }
  }
  pthread_mutex_unlock(&lock);
  standin_called("cudaMalloc");
  return result;
}

int cudaFree(void *address) {
  if (address == NULL) return cudaSuccess;
  pthread_mutex_lock(&lock);
  Region *region = find_region(address);
  if (region != NULL) {
    munmap((void *)region->begin, region->bytes);
    used -= region->bytes;
    *region = regions[--region_count];
  }
  pthread_mutex_unlock(&lock);
  standin_called("cudaFree");
  return cudaSuccess;
}

int cudaHostAlloc(void **address, size_t bytes, unsigned flags) {
  *address = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  pthread_mutex_lock(&lock);
  add_region(*address, bytes, 0);
  pthread_mutex_unlock(&lock);
  standin_called("cudaHostAlloc");
  return cudaSuccess;
}

int cudaHostRegister(void *address, size_t bytes, unsigned flags) {
  pthread_mutex_lock(&lock);
  int is_new = find_region(address) == NULL;
  if (is_new) add_region(address, bytes, 0);
  pthread_mutex_unlock(&lock);
  standin_called("cudaHostRegister");
  return is_new ? cudaSuccess : cudaErrorHostMemoryAlreadyRegistered;
}

int cudaHostUnregister(void *address) {
  pthread_mutex_lock(&lock);
  Region *region = find_region(address);
  int is_known = region != NULL && !region->on_device && region->begin == (uintptr_t)address;
  if (is_known) *region = regions[--region_count];
  pthread_mutex_unlock(&lock);
  standin_called("cudaHostUnregister");
  return is_known ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}

int cudaFreeHost(void *address) {
  cudaHostUnregister(address);
  free(address);
  standin_called("cudaFreeHost");
  return cudaSuccess;
}

int cudaMemGetInfo(size_t *available, size_t *total) {
  *total = standin_bytes();
  *available = *total - used - CONTEXT;
  return cudaSuccess;
}

int cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address) {
  memset(found, 0, sizeof *found);
  pthread_mutex_lock(&lock);
  Region *region = find_region(address);
  found->type = region == NULL ? cudaMemoryTypeUnregistered
                               : (region->on_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost);
  found->device = region == NULL ? -2 : 0;
  found->devicePointer = (void *)address;
  if (region != NULL && !region->on_device) found->hostPointer = (void *)address;
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

// Without data on the device, what comes from there is zero.
static void copy_now(const Copy *copy) {
  if (standin_has_data()) {
    if (copy->source != NULL)
      memmove(copy->target, copy->source, copy->bytes);
    else
      memset(copy->target, copy->value, copy->bytes);
  } else if (!on_device(copy->target)) {
    if (copy->source == NULL || on_device(copy->source))
      memset(copy->target, copy->value, copy->bytes);
    else
      memmove(copy->target, copy->source, copy->bytes);
  }
}

static void run_until(Stream *stream, int asked) {
  while (stream != NULL && stream->ran < asked) copy_now(stream->copies + stream->ran++);
}

// On the default stream at once; on another one not before somebody waits for it.
static int copy_on(Stream *stream, Copy copy) {
  if (stream == NULL) {
    copy_now(&copy);
    return cudaSuccess;
  }
  if (stream->asked == stream->room) {
    stream->room = stream->room ? 2 * stream->room : 64;
    stream->copies = realloc(stream->copies, stream->room * sizeof(Copy));
  }
  stream->copies[stream->asked++] = copy;
  standin_called("copy on a stream");
  return cudaSuccess;
}

int cudaMemcpy(void *target, const void *source, size_t bytes, int kind) {
  return copy_on(NULL, (Copy){target, source, 0, bytes});
}
int cudaMemcpyAsync(void *target, const void *source, size_t bytes, int kind, void *stream) {
  return copy_on(stream, (Copy){target, source, 0, bytes});
}
int cudaMemset(void *target, int value, size_t bytes) { return copy_on(NULL, (Copy){target, NULL, value, bytes}); }
int cudaMemsetAsync(void *target, int value, size_t bytes, void *stream) {
  return copy_on(stream, (Copy){target, NULL, value, bytes});
}

static int new_stream(void **stream) {
  pthread_mutex_lock(&lock);
  streams = realloc(streams, (stream_count + 1) * sizeof(Stream *));
  *stream = streams[stream_count++] = calloc(1, sizeof(Stream));
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}
int cudaStreamCreate(void **stream) { return new_stream(stream); }
int cudaStreamCreateWithFlags(void **stream, unsigned flags) { return new_stream(stream); }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return new_stream(stream); }
int cudaStreamSynchronize(void *stream) {
  if (stream != NULL) run_until(stream, ((Stream *)stream)->asked);
  return cudaSuccess;
}
int cudaStreamQuery(void *stream) {
  return stream != NULL && ((Stream *)stream)->ran < ((Stream *)stream)->asked ? cudaErrorNotReady : cudaSuccess;
}
int cudaDeviceSynchronize(void) {
  for (int i = 0; i < stream_count; i++) run_until(streams[i], streams[i]->asked);
  return cudaSuccess;
}

int cudaEventCreate(void **event) {
  *event = calloc(1, sizeof(Event));
  return cudaSuccess;
}
int cudaEventCreateWithFlags(void **event, unsigned flags) { return cudaEventCreate(event); }
int cudaEventDestroy(void *event) {
  free(event);
  return cudaSuccess;
}
int cudaEventRecord(void *event, void *stream) {
  *(Event *)event = (Event){stream, stream == NULL ? 0 : ((Stream *)stream)->asked};
  return cudaSuccess;
}
int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) { return cudaEventRecord(event, stream); }
int cudaEventQuery(void *event) {
  Event *asked = event;
  return asked->stream != NULL && asked->stream->ran < asked->asked ? cudaErrorNotReady : cudaSuccess;
}
int cudaEventSynchronize(void *event) {
  run_until(((Event *)event)->stream, ((Event *)event)->asked);
  return cudaSuccess;
}
int cudaEventElapsedTime(float *milliseconds, void *begin, void *end) {
  *milliseconds = 1;
  return cudaSuccess;
}
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
  Event *awaited = event;
  if ((void *)awaited->stream != stream) run_until(awaited->stream, awaited->asked);
  standin_called("cudaStreamWaitEvent");
  return cudaSuccess;
}
