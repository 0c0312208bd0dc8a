/* A CUDA runtime without a device: preloaded, it replaces libcudart, cuBLAS and the QR of cuSOLVER for a CUDA build of torch.

   A kernel is counted instead of run, and memory is address space without storage. Data that the host copies there can be
   copied back or sent until the next kernel starts; all other reads return zeros. All code on the host is real: dispatch, the
   caching allocator, autograd's threads, streams, pinned copies, the choice of kernels. Struct layouts are those of CUDA 12.8
   to 13. */

#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "device.h"

enum { OUT_OF_MEMORY = 2, NOT_READY = 600, HOST = 1, DEVICE = 2 };
static const size_t CAPACITY = 80ull << 30, PAGE = 4096;

/* ---- known contents */

typedef struct { const char *at; size_t size; char *data; } Known;
static Known contents[256];
static int known_count;
static pthread_mutex_t knowing = PTHREAD_MUTEX_INITIALIZER;

static void forget(void) {
  if (!known_count) return;
  pthread_mutex_lock(&knowing);
  while (known_count) free(contents[--known_count].data);
  pthread_mutex_unlock(&knowing);
}

void know(const void *at, size_t size, const void *data) {
  if (size > KNOWN) return;
  pthread_mutex_lock(&knowing);
  for (int i = known_count - 1; i >= 0; i--) /* earlier contents */
    if (contents[i].at < (char *)at + size && (char *)at < contents[i].at + contents[i].size)
      free(contents[i].data), contents[i] = contents[--known_count];
  if (known_count < (int)(sizeof contents / sizeof *contents))
    contents[known_count++] = (Known){at, size, memcpy(malloc(size ? size : 1), data, size)};
  pthread_mutex_unlock(&knowing);
}

int read_device(void *to, const void *from, size_t size) {
  int found = 0;
  pthread_mutex_lock(&knowing);
  for (int i = 0; i < known_count && !found; i++)
    if ((char *)from >= contents[i].at && (char *)from + size <= contents[i].at + contents[i].size)
      found = 1, memcpy(to, contents[i].data + ((char *)from - contents[i].at), size);
  pthread_mutex_unlock(&knowing);
  if (!found) memset(to, 0, size);
  return found;
}

/* ---- counters for the rehearsal */

static long launches, waited;
API long rehearsal_launches(void) { return __atomic_load_n(&launches, __ATOMIC_RELAXED); }
API long rehearsal_waits(void) { return __atomic_load_n(&waited, __ATOMIC_RELAXED); }
static int launched(void) { forget(); __atomic_add_fetch(&launches, 1, __ATOMIC_RELAXED); return 0; }
static int waits(void) { __atomic_add_fetch(&waited, 1, __ATOMIC_RELAXED); return 0; }

/* ---- memory: ranges by address */

typedef struct { char *start; size_t size; int kind; } Range;
static Range ranges[1 << 16];
static int used;
static size_t allocated;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static Range *find(const void *address) {
  for (int i = used - 1; i >= 0; i--)
    if (ranges[i].size && (char *)address >= ranges[i].start && (char *)address < ranges[i].start + ranges[i].size)
      return &ranges[i];
  return NULL;
}

static int kind_of(const void *address) {
  pthread_mutex_lock(&lock);
  Range *range = find(address);
  int kind = range ? range->kind : 0;
  pthread_mutex_unlock(&lock);
  return kind;
}

static int reserve(void **address, size_t size, int kind) {
  size = (size + PAGE - 1) / PAGE * PAGE;
  pthread_mutex_lock(&lock);
  int slot = 0, status = OUT_OF_MEMORY;
  while (slot < used && ranges[slot].size) slot++;
  if ((kind == HOST || allocated + size <= CAPACITY) && slot < (int)(sizeof ranges / sizeof *ranges)) {
    char *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start != MAP_FAILED) {
      ranges[slot] = (Range){start, size, kind};
      if (slot == used) used++;
      if (kind == DEVICE) allocated += size;
      *address = start, status = 0;
    }
  }
  pthread_mutex_unlock(&lock);
  return status;
}

static int release(void *address) {
  pthread_mutex_lock(&lock);
  Range *range = find(address);
  if (range) {
    munmap(range->start, range->size);
    if (range->kind == DEVICE) allocated -= range->size;
    range->size = 0;
  }
  pthread_mutex_unlock(&lock);
  return 0;
}

static void finish(void *stream);

static int copy(void *to, const void *from, size_t size, void *stream, int pageable_waits) {
  int target = kind_of(to), source = kind_of(from);
  if (target == DEVICE && source == DEVICE) return launched();
  if (source == DEVICE) finish(stream), read_device(to, from, size);
  else if (target == DEVICE) know(to, size, from);
  else memcpy(to, from, size);
  if (pageable_waits && source == 0) waits(); /* a copy to the host is followed by a wait for the stream */
  return 0;
}

API int cudaMalloc(void **address, size_t size) { return reserve(address, size, DEVICE); }
API int cudaFree(void *address) { return release(address); }
API int cudaHostAlloc(void **address, size_t size, unsigned flags) { return reserve(address, size, HOST); }
API int cudaFreeHost(void *address) { return release(address); }
API int cudaMemGetInfo(size_t *left, size_t *total) { *left = CAPACITY - allocated, *total = CAPACITY; return 0; }
API int cudaMemcpy(void *to, const void *from, size_t size, int kind) { waits(); return copy(to, from, size, NULL, 0); }
API int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) { return copy(to, from, size, stream, 1); }
API int cudaMemset(void *address, int value, size_t size) { return launched(); }
API int cudaMemsetAsync(void *address, int value, size_t size, void *stream) { return launched(); }
typedef struct { int kind, device; void *device_pointer, *host_pointer; } Pointer;
API int cudaPointerGetAttributes(Pointer *found, const void *address) {
  int kind = kind_of(address);
  *found = (Pointer){kind, 0, kind == DEVICE ? (void *)address : NULL, kind == HOST ? (void *)address : NULL};
  return 0;
}
API int cudaGetSymbolAddress(void **address, const void *symbol) { static char symbols[1 << 20]; *address = symbols; return 0; }

/* ---- the device */

typedef struct {
  char name[256], uuid[16], luid[8];
  unsigned luid_mask;
  size_t memory, shared_per_block;
  int registers, warp;
  size_t pitch;
  int threads_per_block, threads[3], grid[3];
  size_t constant;
  int major, minor;
  size_t texture_alignment, texture_pitch;
  int processors, integrated, maps_host, textures[2 + 2 + 2 + 3 + 2 + 3 + 3 + 1 + 2 + 3 + 2], surfaces[1 + 2 + 3 + 2 + 3 + 1 + 2];
  size_t surface_alignment;
  int concurrent, ecc, bus, device, domain, tcc, engines, unified, bus_width, l2, persisting_l2, threads_per_processor;
  int priorities, global_l1, local_l1;
  size_t shared_per_processor;
  int registers_per_processor, of_boards[8];
  size_t shared_optin;
  int host_tables, managed, blocks_per_processor;
} Properties;
API int cudaGetDeviceProperties(Properties *found, int device) {
  strcpy(found->name, "NVIDIA H100 80GB HBM3 (rehearsed)");
  found->memory = CAPACITY, found->shared_per_block = 49152, found->registers = 65536, found->warp = 32;
  found->threads_per_block = 1024, found->major = 9, found->minor = 0, found->processors = 132;
  found->l2 = 50 << 20, found->threads_per_processor = 2048, found->registers_per_processor = 65536;
  found->shared_per_processor = 233472, found->shared_optin = 232448, found->blocks_per_processor = 32;
  for (int i = 0; i < 3; i++) found->threads[i] = i < 2 ? 1024 : 64, found->grid[i] = i ? 65535 : 2147483647;
  return 0;
}
API int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case 1: *value = 1024; break;    /* threads per block */
    case 8: *value = 49152; break;   /* shared memory per block */
    case 10: *value = 32; break;     /* warp */
    case 16: *value = 132; break;    /* multiprocessors */
    case 39: *value = 2048; break;   /* threads per multiprocessor */
    case 75: *value = 9; break;      /* compute capability */
    case 76: *value = 0; break;
    case 81: *value = 233472; break; /* shared memory per multiprocessor */
    case 97: *value = 232448; break; /* largest shared memory per block */
    default: *value = 1;
  }
  return 0;
}
static __thread int current;
API int cudaGetDeviceCount(int *count) { *count = 8; return 0; }
API int cudaGetDevice(int *device) { *device = current; return 0; }
API int cudaSetDevice(int device) { current = device; return 0; }
API int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
API int cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
API int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0, *greatest = -5; return 0; }
API int cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 0; return 0; }
API int cudaDeviceGetPCIBusId(char *id, int size, int device) { strncpy(id, "0000:01:00.0", size); return 0; }
API const char *cudaGetErrorName(int error) { return error == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation" : "error"; }
API const char *cudaGetErrorString(int error) { return error == OUT_OF_MEMORY ? "out of memory" : "error"; }
static int nothing(void) { return 0; }
API int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long flags, int *found) {
  *function = (void *)nothing;
  if (found) *found = 0;
  return 0;
}
DONE(cudaGetLastError) DONE(cudaPeekAtLastError) DONE(cudaDeviceEnablePeerAccess)
DONE(cudaProfilerStart) DONE(cudaProfilerStop) DONE(cudaHostRegister) DONE(cudaHostUnregister)

/* ---- streams and events: computation ends at once, communication when all peers have arrived (nccl.c) */

static Stream no_stream;
pthread_mutex_t progress = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t progressed = PTHREAD_COND_INITIALIZER;

Stream *stream_of(void *handle) { return (uintptr_t)handle < 3 ? &no_stream : handle; }

static void depend(Marks *marks, Stream *on, long ticket) {
  int i = 0;
  while (i < marks->count && marks->on[i] != on) i++;
  if (i == marks->count && on->done >= ticket) return;
  if (i == MARKS) abort();
  if (i == marks->count) marks->on[marks->count] = on, marks->ticket[marks->count++] = 0;
  if (marks->ticket[i] < ticket) marks->ticket[i] = ticket;
}

void marks_of(Stream *stream, Marks *marks) {
  marks->count = 0;
  for (int i = 0; i < stream->waits.count; i++) depend(marks, stream->waits.on[i], stream->waits.ticket[i]);
  stream->waits = *marks;
  depend(marks, stream, stream->enqueued);
}

int reached(const Marks *marks) {
  for (int i = 0; i < marks->count; i++)
    if (marks->on[i]->done < marks->ticket[i]) return 0;
  return 1;
}

static void finish(void *handle) {
  Marks marks;
  pthread_mutex_lock(&progress);
  marks_of(stream_of(handle), &marks);
  while (!reached(&marks)) pthread_cond_wait(&progressed, &progress);
  pthread_mutex_unlock(&progress);
}

static int query(const Marks *marks) {
  pthread_mutex_lock(&progress);
  int status = reached(marks) ? 0 : NOT_READY;
  pthread_mutex_unlock(&progress);
  return status;
}

static int made(void **handle) { *handle = calloc(1, sizeof(Stream) + sizeof(Marks)); return 0; }
API int cudaStreamCreate(void **stream) { return made(stream); }
API int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return made(stream); }
API int cudaStreamGetPriority(void *stream, int *priority) { *priority = 0; return 0; }
API int cudaStreamSynchronize(void *stream) { finish(stream); return waits(); }
API int cudaDeviceSynchronize(void) { finish(NULL); return waits(); }
API int cudaStreamQuery(void *stream) {
  Marks marks;
  pthread_mutex_lock(&progress);
  marks_of(stream_of(stream), &marks);
  pthread_mutex_unlock(&progress);
  return query(&marks);
}
API int cudaStreamWaitEvent(void *stream, Marks *event, unsigned flags) {
  pthread_mutex_lock(&progress);
  for (int i = 0; i < event->count; i++) depend(&stream_of(stream)->waits, event->on[i], event->ticket[i]);
  pthread_mutex_unlock(&progress);
  return 0;
}
API int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
API int cudaStreamGetCaptureInfo(void *stream, int *status) { *status = 0; return 0; }
API int cudaStreamGetCaptureInfo_v2(void *stream, int *status) { *status = 0; return 0; }
API int cudaStreamGetCaptureInfo_v3(void *stream, int *status) { *status = 0; return 0; }
API int cudaEventCreate(void **event) { return made(event); }
API int cudaEventCreateWithFlags(void **event, unsigned flags) { return made(event); }
API int cudaEventRecord(Marks *event, void *stream) {
  pthread_mutex_lock(&progress);
  marks_of(stream_of(stream), event);
  pthread_mutex_unlock(&progress);
  return 0;
}
API int cudaEventRecordWithFlags(Marks *event, void *stream, unsigned flags) { return cudaEventRecord(event, stream); }
API int cudaEventQuery(Marks *event) { return query(event); }
API int cudaEventSynchronize(Marks *event) {
  pthread_mutex_lock(&progress);
  while (!reached(event)) pthread_cond_wait(&progressed, &progress);
  pthread_mutex_unlock(&progress);
  return waits();
}
API int cudaEventElapsedTime(float *milliseconds, void *start, void *end) { *milliseconds = 1.0f; return 0; }
DONE(cudaStreamDestroy) DONE(cudaThreadExchangeStreamCaptureMode) DONE(cudaEventDestroy)

/* ---- kernels */

typedef struct { size_t shared, constant, local; int threads, registers, ptx, binary, cache, dynamic_shared; } Function;
API int cudaFuncGetAttributes(Function *found, const void *function) {
  *found = (Function){0, 0, 0, 1024, 32, 90, 90, 0, 232448};
  return 0;
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *f, int threads, size_t shared, unsigned flags) {
  *blocks = 2;
  return 0;
}
API int __cudaGetKernel(void **kernel, const void *entry) { *kernel = (void *)entry; return 0; }
API int __cudaLaunchKernel(void) { return launched(); }
API int cudaLaunchKernel(void) { return launched(); }
API int cudaLaunchKernelExC(void) { return launched(); }
DONE(cudaFuncSetAttribute)

/* ---- cuBLAS */

#define PRODUCT(name) API int name(void) { return launched(); }
API int cublasCreate_v2(void **handle) { return made(handle); }
API int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
API int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
DONE(cublasDestroy_v2) DONE(cublasSetStream_v2) DONE(cublasSetWorkspace_v2) DONE(cublasSetMathMode) DONE(cublasSetPointerMode_v2)
PRODUCT(cublasSgemm_v2) PRODUCT(cublasDgemm_v2) PRODUCT(cublasGemmEx) PRODUCT(cublasSgemmEx) PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemmStridedBatched) PRODUCT(cublasGemmStridedBatchedEx) PRODUCT(cublasSgemv_v2) PRODUCT(cublasDgemv_v2)
PRODUCT(cublasStrsmBatched) PRODUCT(cublasStrsm_v2)
PRODUCT(cublasSdot_v2) PRODUCT(cublasDdot_v2) PRODUCT(cublasDotEx) PRODUCT(cublasLtMatmul)
typedef struct { uint64_t algorithm[8]; size_t workspace; int status; float waves; int reserved[4]; } Heuristic;
API int cublasLtMatmulAlgoGetHeuristic(void *l, void *d, void *a, void *b, void *c, void *e, void *p, int asked, Heuristic *found, int *count) {
  memset(found, 0, sizeof *found);
  *count = 1;
  return 0;
}
API int cublasLtMatmulDescCreate(void **made_) { return made(made_); }
API int cublasLtMatrixLayoutCreate(void **made_) { return made(made_); }
API int cublasLtMatmulPreferenceCreate(void **made_) { return made(made_); }
DONE(cublasLtMatmulDescDestroy) DONE(cublasLtMatmulDescSetAttribute) DONE(cublasLtMatrixLayoutDestroy)
DONE(cublasLtMatrixLayoutSetAttribute) DONE(cublasLtMatmulPreferenceDestroy) DONE(cublasLtMatmulPreferenceSetAttribute)

/* ---- cuSOLVER: the QR decomposition */

API int cusolverDnCreate(void **handle) { return made(handle); }
API int cusolverDnCreateParams(void **params) { return made(params); }
API int cusolverDnXgeqrf_bufferSize(void *h, void *p, int64_t m, int64_t n, int t, void *a, int64_t l, int u, void *tau, int c, size_t *device, size_t *host) {
  *device = *host = 0;
  return 0;
}
API int cusolverDnSorgqr_bufferSize(void *h, int m, int n, int k, void *a, int l, void *tau, int *size) { *size = 0; return 0; }
PRODUCT(cusolverDnXgeqrf) PRODUCT(cusolverDnSorgqr)
DONE(cusolverDnDestroy) DONE(cusolverDnDestroyParams) DONE(cusolverDnSetStream)

/* ---- the driver functions that torch looks up by name */

API int cuInit(unsigned flags) { return 0; }
API int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
API int cuCtxGetCurrent(void **context) { *context = (void *)ranges; return 0; }
API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0, *active = 1; return 0; }
API int cuGetErrorString(int error, const char **text) { *text = "error"; return 0; }
API int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *found) {
  *function = (void *)nothing;
  if (found) *found = 0;
  return 0;
}
API int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute ? 0 : 1024; return 0; }
API int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
API int cuDeviceGetAttribute(int *value, int attribute, int device) { return cudaDeviceGetAttribute(value, attribute, device); }
API int cuCtxGetLimit(size_t *value, int limit) { *value = 1 << 20; return 0; }
API int cuModuleLoadData(void **module, const void *image) { return made(module); }
API int cuModuleGetFunction(void **function, void *module, const char *name) { return made(function); }
API int cuLaunchKernel(void) { return launched(); }
API int cuLaunchKernelEx(void) { return launched(); }
DONE(cuCtxSetCurrent) DONE(cuCtxSetLimit) DONE(cuModuleLoadDataEx) DONE(cuModuleUnload) DONE(cuFuncSetCacheConfig)
DONE(cuOccupancyMaxActiveBlocksPerMultiprocessor) DONE(cuFuncSetAttribute) DONE(cuDevicePrimaryCtxRetain)
DONE(cuStreamWriteValue32) DONE(cuTensorMapEncodeTiled) DONE(cuLaunchCooperativeKernel) DONE(cuLinkCreate) DONE(cuLinkAddData)
DONE(cuLinkComplete) DONE(cuPointerGetAttribute) DONE(cuLinkDestroy) DONE(cuModuleGetGlobal)
