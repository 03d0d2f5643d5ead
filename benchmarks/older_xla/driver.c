/* Stands in for CUDA's libraries while an older XLA compiles: GPUs as the environment describes them, which run nothing.
 * Every other function that XLA's plugin asks for is appended as one that returns 0, success. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static int of(const char *name) { return atoi(getenv(name)); }
static __thread long current = 0x1000;

int cuDriverGetVersion(int *v) { *v = of("CUDA_VERSION"); return 0; }
int cudaDriverGetVersion(int *v) { *v = of("CUDA_VERSION"); return 0; }
int cudaRuntimeGetVersion(int *v) { *v = of("CUDA_VERSION"); return 0; }
int cublasGetVersion_v2(void *h, int *v) { *v = of("CUDA_VERSION") / 10 * 100; return 0; }
size_t cudnnGetVersion(void) { return of("CUDNN_VERSION"); }
int cudnnGetProperty(int part, int *v) {
  int version = of("CUDNN_VERSION"), major = version < 90000 ? 1000 : 10000;
  *v = part == 0 ? version / major : part == 1 ? version % major / 100 : version % 100;
  return 0;
}

int cuDeviceGetCount(int *n) { *n = of("GPU_COUNT"); return 0; }
int cudaGetDeviceCount(int *n) { *n = of("GPU_COUNT"); return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *s, int n, int device) { snprintf(s, n, "%s", getenv("GPU_NAME")); return 0; }
int cuDeviceGetPCIBusId(char *s, int n, int device) {
  snprintf(s, n, "%04x:%02x:00.0", device >> 8, device & 255);
  return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = strtoull(getenv("GPU_BYTES"), 0, 10); return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { *free = *total = strtoull(getenv("GPU_BYTES"), 0, 10); return 0; }

/* Those that are alike on all data center GPUs: threads of a block, its dims, a grid's, warp, registers, blocks. */
static const int alike[][2] = {{1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535},
                               {10, 32}, {12, 65536}, {32, 0}, {106, 32}};
int cuDeviceGetAttribute(int *v, int attribute, int device) {
  char name[32];
  snprintf(name, sizeof name, "GPU_ATTRIBUTE_%d", attribute);
  *v = getenv(name) ? of(name) : 1;
  for (unsigned i = 0; i < sizeof alike / sizeof *alike; i++)
    if (alike[i][0] == attribute) *v = alike[i][1];
  return 0;
}
int cudaDeviceGetAttribute(int *v, int attribute, int device) { return cuDeviceGetAttribute(v, attribute, device); }
int cuDeviceCanAccessPeer(int *v, int a, int b) { *v = 1; return 0; }

int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(0x1000L + device); return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = *active = 0; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)current; return 0; }
int cuCtxSetCurrent(void *context) { current = (long)context; return 0; }
int cuCtxGetDevice(int *device) { *device = current - 0x1000; return 0; }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }

static long handles = 0x100000;
#define HANDLE(name) int name(void **h) { *h = (void *)__sync_add_and_fetch(&handles, 16); return 0; }
HANDLE(cuStreamCreate) HANDLE(cuStreamCreateWithPriority) HANDLE(cuEventCreate) HANDLE(cuModuleLoadData)
HANDLE(cuModuleLoadDataEx) HANDLE(cuModuleLoadFatBinary) HANDLE(cuModuleGetFunction) HANDLE(cudaGetFuncBySymbol)
HANDLE(cublasCreate_v2) HANDLE(cublasLtCreate) HANDLE(cudnnCreate) HANDLE(cusolverDnCreate) HANDLE(cusparseCreate)

static uint64_t heap = 1ULL << 40;
int cuMemAlloc_v2(uint64_t *p, size_t n) { *p = __sync_fetch_and_add(&heap, (n + 4095) & ~4095ULL); return 0; }
int cuMemHostAlloc(void **p, size_t n, unsigned flags) { *p = aligned_alloc(4096, (n + 4095) & ~4095ULL); return 0; }
int cuModuleGetGlobal_v2(uint64_t *p, size_t *n, void *module, const char *name) { *p = 1ULL << 39; *n = 4096; return 0; }
int cuPointerGetAttribute(void *v, int attribute, uint64_t p) { return 1; }
int cuStreamIsCapturing(void *stream, int *v) { *v = 0; return 0; }
int cuEventElapsedTime(float *ms, void *a, void *b) { *ms = 1; return 0; }

int cuGetErrorName(int error, const char **s) { *s = "error"; return 0; }
int cuGetErrorString(int error, const char **s) { *s = "error"; return 0; }
const char *cudaGetErrorName(int error) { return "error"; }
const char *cudaGetErrorString(int error) { return "error"; }
const char *cudnnGetErrorString(int error) { return "error"; }
