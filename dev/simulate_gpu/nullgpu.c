/*
 * A GPU that does nothing: enough of CUDA's runtime, driver, cuBLAS and NVML for PyTorch's CUDA build
 * to train on a machine without a card. It is preloaded (LD_PRELOAD), so that its functions stand in
 * for those of the same name. Memory is given out as addresses, counted, and never backed; kernels and
 * products are counted, not run; copies to the host give zeros; waits for the card are counted.
 *
 * NULLGPU="name|major|minor|SMs|GiB|KiB of shared memory per block|per SM|MiB of L2|threads per SM".
 * A caller passes its arguments in registers and cleans up its own stack, so a function that needs
 * none of them, or only the first, is declared without the others.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <driver_types.h> /* from a wheel: CUDA's types alone */
#include <library_types.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define NOTHING(name) int name(void) { return 0; }
#define REFUSE(name) int name(void) { return 3; } /* NVML_ERROR_NOT_SUPPORTED */
#define WAIT(name) int name(void) { waits++; return 0; }
#define SET(name, value) int name(int *out) { *out = (value); return 0; }
#define SECOND(name, value) int name(void *of, int *out) { *out = (value); return 0; }
#define MAKE(name) int name(void **out) { *out = new_handle(); return 0; }

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t used, peak, capacity, waits, last_handle = 0x1000;
static char card_name[200];
static int attributes[200];
#define CARD(name) attributes[cudaDevAttr##name]

__attribute__((constructor)) static void read_card(void) {
  const char *text = getenv("NULLGPU");
  int gib, block_kib, sm_kib, l2_mib;
  if (!text) text = "NVIDIA GeForce RTX 4070|8|9|46|12|99|100|36|1536";
  if (sscanf(text, "%199[^|]|%d|%d|%d|%d|%d|%d|%d|%d", card_name, &CARD(ComputeCapabilityMajor),
             &CARD(ComputeCapabilityMinor), &CARD(MultiProcessorCount), &gib, &block_kib, &sm_kib, &l2_mib,
             &CARD(MaxThreadsPerMultiProcessor)) != 9) {
    fprintf(stderr, "NULLGPU: nine fields, not %s\n", text);
    exit(2);
  }
  capacity = (uint64_t)gib << 30;
  CARD(MaxSharedMemoryPerBlockOptin) = block_kib << 10, CARD(MaxSharedMemoryPerMultiprocessor) = sm_kib << 10;
  CARD(L2CacheSize) = l2_mib << 20, CARD(WarpSize) = 32, CARD(MaxSharedMemoryPerBlock) = 48 << 10;
  CARD(MaxThreadsPerBlock) = CARD(MaxBlockDimX) = CARD(MaxBlockDimY) = 1024, CARD(MaxBlockDimZ) = 64;
  CARD(MaxGridDimX) = 0x7fffffff, CARD(MaxGridDimY) = CARD(MaxGridDimZ) = 65535;
  CARD(MaxRegistersPerBlock) = CARD(MaxRegistersPerMultiprocessor) = 65536;
  CARD(CooperativeLaunch) = CARD(UnifiedAddressing) = 1;
  attributes[102] = 1; /* the driver's: memory is mapped page by page */
}
static void *new_handle(void) { return (void *)(uintptr_t)__sync_add_and_fetch(&last_handle, 16); }

/* --- Counting: kernels by the address that launches them, products by their sizes */

#define KERNELS (1 << 19)
static struct kernel { const void *address; const char *name; uint64_t count; } kernels[KERNELS];
static struct product { int m, n, k, type; uint64_t count; } products[1024];
static struct kernel *find_kernel(const void *address) { /* its place, or the free one for it */
  uint64_t i = ((uintptr_t)address * 0x9E3779B97F4A7C15ull) >> 45;
  while (kernels[i].address && kernels[i].address != address) i = (i + 1) % KERNELS;
  return &kernels[i];
}
static void name_kernel(const void *address, const char *name) {
  pthread_mutex_lock(&lock);
  *find_kernel(address) = (struct kernel){address, name, 0};
  pthread_mutex_unlock(&lock);
}
static int launch(const void *address) { __sync_fetch_and_add(&find_kernel(address)->count, 1); return 0; }
static int multiply(int m, int n, int k, int type) {
  pthread_mutex_lock(&lock);
  struct product *p = products;
  while (p->count && (p->m != m || p->n != n || p->k != k || p->type != type)) p++;
  *p = (struct product){m, n, k, type, p->count + 1};
  pthread_mutex_unlock(&lock);
  return 0;
}
void nullgpu_report(const char *path) { /* all that was counted so far, a line each */
  FILE *file = fopen(path, "w");
  fprintf(file, "waits %lu\npeak %lu\n", waits, peak);
  for (struct kernel *k = kernels; k < kernels + KERNELS; k++)
    if (k->count) fprintf(file, "kernel %lu %s\n", k->count, k->name ? k->name : "?");
  for (struct product *p = products; p->count; p++)
    fprintf(file, "product %lu %d %d %d %d\n", p->count, p->m, p->n, p->k, p->type);
  fclose(file);
}

/* --- Memory: address ranges, so that a copy knows its sides; only the card's pages are counted */

enum { ADDRESSES, PAGES, PINNED };
static struct range { char *start; uint64_t size; int kind; } ranges[1 << 20];
static int n_ranges;
static struct range *find_range(const void *p) {
  for (struct range *r = ranges; r < ranges + n_ranges; r++)
    if (r->start && (char *)p >= r->start && (char *)p < r->start + r->size) return r;
  return NULL;
}
static int on_card(const void *p) { struct range *r = find_range(p); return r && r->kind != PINNED; }
static void note(void *start, uint64_t size, int kind) {
  pthread_mutex_lock(&lock);
  ranges[n_ranges++] = (struct range){start, size, kind};
  pthread_mutex_unlock(&lock);
}
static void *new_addresses(uint64_t size, uint64_t align, int kind) {
  if (align < (2 << 20)) align = 2 << 20;
  char *p = mmap(NULL, size + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return NULL;
  p = (char *)(((uintptr_t)p + align - 1) / align * align);
  note(p, size, kind);
  return p;
}
static int take(uint64_t size) {
  pthread_mutex_lock(&lock);
  int fits = used + size <= capacity;
  if (fits && (used += size) > peak) peak = used;
  pthread_mutex_unlock(&lock);
  return fits;
}
int cudaMalloc(void **p, size_t size) {
  return take(size) && (*p = new_addresses(size, 0, PAGES)) ? 0 : cudaErrorMemoryAllocation;
}
int cudaFree(void *p) {
  struct range *r = p ? find_range(p) : NULL;
  if (r) used -= r->kind == PAGES ? r->size : 0, munmap(r->start, r->size), r->start = NULL;
  return 0;
}
int cudaHostAlloc(void **p, size_t size) {
  if (posix_memalign(p, 4096, size ? size : 1)) return cudaErrorMemoryAllocation;
  note(*p, size, PINNED);
  return 0;
}
int cudaFreeHost(void *p) { struct range *r = find_range(p); if (r) r->start = NULL; free(p); return 0; }
int cudaMemGetInfo(size_t *left, size_t *total) { *total = capacity, *left = *total - used; return 0; }
int cudaMemcpyAsync(void *to, const void *from, size_t size) {
  if (on_card(to)) return 0;
  if (!on_card(from)) return memcpy(to, from, size), 0;
  waits += !find_range(to);         /* into memory that is not pinned */
  return memset(to, size == 1, size), 0; /* one byte is a truth value, such as "all are finite" */
}
int cudaMemcpy(void *to, const void *from, size_t size) { return waits++, cudaMemcpyAsync(to, from, size); }
int cudaPointerGetAttributes(struct cudaPointerAttributes *a, void *p) {
  *a = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered};
  if (on_card(p)) a->type = cudaMemoryTypeDevice, a->devicePointer = p;
  return 0;
}
int cudaGetSymbolAddress(void **p) { *p = new_addresses(1 << 20, 0, ADDRESSES); return 0; }
NOTHING(cudaMemcpyPeerAsync) NOTHING(cudaMemset) NOTHING(cudaMemsetAsync) NOTHING(cudaMemcpyToSymbol)
NOTHING(cudaHostRegister) NOTHING(cudaHostUnregister)
/* pages under reserved addresses, for the allocator's expandable segments; known by their size alone */
int cuMemAddressReserve(void **p, size_t size, size_t align) {
  return (*p = new_addresses(size, align, ADDRESSES)) ? 0 : cudaErrorMemoryAllocation;
}
int cuMemCreate(size_t *pages, size_t size) { return take(*pages = size) ? 0 : cudaErrorMemoryAllocation; }
int cuMemRelease(uint64_t pages) { __sync_fetch_and_sub(&used, pages); return 0; }
int cuMemGetAllocationGranularity(size_t *size) { *size = 2 << 20; return 0; }
NOTHING(cuMemAddressFree) NOTHING(cuMemMap) NOTHING(cuMemUnmap) NOTHING(cuMemSetAccess)

/* --- The card */

int cudaDeviceGetAttribute(int *value, int which) { *value = which < 200 ? attributes[which] : 0; return 0; }
int cuDeviceGetAttribute(int *value, int which) { return cudaDeviceGetAttribute(value, which); }
int cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, card_name);
  p->major = CARD(ComputeCapabilityMajor), p->minor = CARD(ComputeCapabilityMinor);
  p->totalGlobalMem = capacity, p->l2CacheSize = CARD(L2CacheSize), p->warpSize = CARD(WarpSize);
  p->multiProcessorCount = CARD(MultiProcessorCount), p->maxBlocksPerMultiProcessor = 24;
  p->maxThreadsPerMultiProcessor = CARD(MaxThreadsPerMultiProcessor), p->maxThreadsDim[2] = 64;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = CARD(MaxThreadsPerBlock);
  p->maxGridSize[0] = CARD(MaxGridDimX), p->maxGridSize[1] = p->maxGridSize[2] = CARD(MaxGridDimY);
  p->sharedMemPerBlock = CARD(MaxSharedMemoryPerBlock), p->reservedSharedMemPerBlock = 1024;
  p->sharedMemPerBlockOptin = CARD(MaxSharedMemoryPerBlockOptin), p->unifiedAddressing = 1;
  p->sharedMemPerMultiprocessor = CARD(MaxSharedMemoryPerMultiprocessor), p->cooperativeLaunch = 1;
  p->regsPerBlock = p->regsPerMultiprocessor = CARD(MaxRegistersPerBlock);
  return 0;
}
int cudaDeviceGetPCIBusId(char *text) { strcpy(text, "0000:01:00.0"); return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *most) { *least = 0, *most = -5; return 0; }
SET(cudaGetDeviceCount, 1) SET(cudaGetDevice, 0) NOTHING(cudaSetDevice) NOTHING(cudaDeviceCanAccessPeer)
SET(cuDeviceGetCount, 1) SET(cuDeviceGet, 0) NOTHING(cudaGetLastError) NOTHING(cudaPeekAtLastError)
SET(cudaDriverGetVersion, 13000) SET(cudaRuntimeGetVersion, 13000) SET(cuDriverGetVersion, 13000)

/* --- Streams and events */

WAIT(cudaDeviceSynchronize) WAIT(cudaStreamSynchronize) WAIT(cudaEventSynchronize)
MAKE(cudaStreamCreate) MAKE(cudaStreamCreateWithFlags) MAKE(cudaStreamCreateWithPriority)
MAKE(cudaEventCreate) MAKE(cudaEventCreateWithFlags)
SECOND(cudaStreamGetPriority, 0) SECOND(cudaStreamIsCapturing, 0) SECOND(cudaStreamGetCaptureInfo, 0)
int cudaEventElapsedTime(float *ms) { *ms = 1; return 0; }
NOTHING(cudaStreamDestroy) NOTHING(cudaStreamQuery) NOTHING(cudaStreamWaitEvent) NOTHING(cudaEventDestroy)
NOTHING(cudaEventQuery) NOTHING(cudaEventRecord) NOTHING(cudaEventRecordWithFlags)
NOTHING(cudaThreadExchangeStreamCaptureMode)

/* --- Kernels: torch's come with their names, Triton's are asked for by name */

void __cudaRegisterFunction(void **library, const void *address, char *stub, const char *name) {
  name_kernel(address, name);
}
int cuModuleGetFunction(void **f, void *module, const char *name) {
  return name_kernel(*f = new_handle(), strdup(name)), 0;
}
int cudaLaunchKernel(const void *f) { return launch(f); }
int __cudaLaunchKernel(const void *f) { return launch(f); }
int cuLaunchKernel(const void *f) { return launch(f); }
int cudaLaunchKernelExC(const void *settings, const void *f) { return launch(f); }
int cuLaunchKernelEx(const void *settings, const void *f) { return launch(f); }
int __cudaGetKernel(const void **kernel, const void *f) { *kernel = f; return 0; }
int cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  int minor = CARD(ComputeCapabilityMinor) == 9 ? 6 : CARD(ComputeCapabilityMinor); /* the wheel's for 8.9 */
  *a = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32};
  a->ptxVersion = a->binaryVersion = 10 * CARD(ComputeCapabilityMajor) + minor;
  a->maxDynamicSharedSizeBytes = CARD(MaxSharedMemoryPerBlockOptin);
  return 0;
}
int cuFuncGetAttribute(int *value, int which) { return *value = which ? 0 : 1024, 0; } /* 0: threads */
SET(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, 2) SET(cuOccupancyMaxActiveClusters, 1)
NOTHING(cudaFuncSetAttribute) NOTHING(cudaKernelSetAttributeForDevice) NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncSetCacheConfig) MAKE(cuModuleLoadData) MAKE(cuModuleLoad) NOTHING(cuModuleUnload)

/* --- The driver beside these; a function that is not here says that it is not supported */

MAKE(cuCtxGetCurrent) MAKE(cuDevicePrimaryCtxRetain) NOTHING(cuInit) NOTHING(cuCtxSetCurrent)
NOTHING(cuCtxPushCurrent_v2) NOTHING(cuCtxPopCurrent_v2) NOTHING(cuCtxSetLimit) SET(cuCtxGetLimit, 0)
int cuDevicePrimaryCtxGetState(int device, unsigned *f, int *active) { *f = 0, *active = 1; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "an error of the null GPU"; return 0; }
int cuPointerGetAttribute(void *value, int which, void *p) { /* 3: its address on the card */
  return which == 3 ? (*(void **)value = p, 0) : (*(int *)value = 1 + on_card(p), 0);
}
static int unsupported(void) { return cudaErrorNotSupported; }
int cudaGetDriverEntryPointByVersion(char *name, void **f, unsigned version, uint64_t flags, int *result) {
  char newer[200];
  snprintf(newer, sizeof newer, "%s_v2", name);
  if (!(*f = dlsym(RTLD_DEFAULT, name)) && !(*f = dlsym(RTLD_DEFAULT, newer))) *f = unsupported;
  if (result) *result = cudaDriverEntryPointSuccess;
  return 0;
}

/* --- cuBLAS: products by their sizes; type is that of the numbers in them */

#define SIZES void *h, int ta, int tb, int m, int n, int k
int cublasGemmEx(SIZES, void *alpha, void *a, int type) { return multiply(m, n, k, type); }
int cublasSgemm_v2(SIZES) { return multiply(m, n, k, CUDA_R_32F); }
int cublasLtMatmul(void) { return multiply(0, 0, 0, -1); } /* these are only counted */
int cublasGemmStridedBatchedEx(void) { return multiply(0, 0, 0, -1); }
int cublasSgemmStridedBatched(void) { return multiply(0, 0, 0, -1); }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *dd, void *preference,
                                   int wanted, void *result, int *found) {
  return memset(result, 0, 96), *found = 1, 0; /* one algorithm, without workspace */
}
SECOND(cublasGetMathMode, 0) SECOND(cublasGetPointerMode_v2, 0)
MAKE(cublasCreate_v2) NOTHING(cublasDestroy_v2) NOTHING(cublasSetStream_v2) NOTHING(cublasSetWorkspace_v2)
NOTHING(cublasSetMathMode) NOTHING(cublasSetPointerMode_v2) NOTHING(cublasSetSmCountTarget)

/* --- NVML: the allocator asks which process it is, and for links to other cards: there are none */

NOTHING(nvmlInit_v2) NOTHING(nvmlDeviceGetHandleByPciBusId_v2) SET(nvmlSystemGetCudaDriverVersion_v2, 13000)
SECOND(nvmlDeviceGetComputeRunningProcesses, 0) REFUSE(nvmlDeviceGetGpuFabricInfoV)
REFUSE(nvmlDeviceGetNvLinkRemoteDeviceType) REFUSE(nvmlDeviceGetNvLinkRemotePciInfo_v2)
