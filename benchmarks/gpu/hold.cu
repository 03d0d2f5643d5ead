// Kernels that run until they are told to stop, in a stream of their own: what a collective in flight takes from others.
// `hold`: as many multiprocessors as it has blocks, by their shared memory. `stream`: device memory, read and written.
// Both end by themselves at a deadline, so that nothing that goes wrong here can hold the GPU.
#include <cuda_runtime.h>

__device__ unsigned long long now_ns() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

__global__ void hold_kernel(volatile int* stop, unsigned long long limit_ns) {
  const unsigned long long end = now_ns() + limit_ns;
  while (!*stop && now_ns() < end) __nanosleep(1000);
}

__global__ void stream_kernel(volatile int* stop, unsigned long long limit_ns, float4* data, size_t count,
                              unsigned long long* moved) {
  const unsigned long long end = now_ns() + limit_ns;
  const size_t step = (size_t)gridDim.x * blockDim.x, first = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  unsigned long long bytes = 0;
  while (!*stop && now_ns() < end)
    for (size_t i = first; i < count; i += step) {
      float4 v = data[i];
      v.x += 1.0f;
      data[i] = v;
      bytes += 2 * sizeof(float4);
    }
  atomicAdd(moved, bytes);
}

static int* stop_host;
static float4* buffer;
static unsigned long long* moved_device;
static cudaStream_t stream;
static const size_t BUFFER = (size_t)1 << 30;

extern "C" int prepare() {
  int* mapped;
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) return 1;
  if (cudaHostAlloc(&stop_host, sizeof(int), cudaHostAllocMapped)) return 2;
  if (cudaHostGetDevicePointer(&mapped, stop_host, 0)) return 3;
  if (cudaMalloc(&buffer, BUFFER) || cudaMalloc(&moved_device, sizeof(*moved_device))) return 4;
  return cudaFuncSetAttribute(hold_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024);
}

extern "C" int begin(int held, int streaming, double limit_s) {
  const unsigned long long limit = (unsigned long long)(limit_s * 1e9);
  *stop_host = 0;
  cudaMemsetAsync(moved_device, 0, sizeof(*moved_device), stream);
  if (held) hold_kernel<<<held, 128, 200 * 1024, stream>>>(stop_host, limit);
  if (streaming) stream_kernel<<<streaming, 512, 0, stream>>>(stop_host, limit, buffer, BUFFER / sizeof(float4), moved_device);
  return cudaGetLastError();
}

extern "C" double finish() {
  unsigned long long moved = 0;
  *stop_host = 1;
  if (cudaStreamSynchronize(stream)) return -1;
  cudaMemcpy(&moved, moved_device, sizeof(moved), cudaMemcpyDeviceToHost);
  return (double)moved;
}
