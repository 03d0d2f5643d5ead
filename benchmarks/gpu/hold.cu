// Kernels that run until they are told to stop, in a stream of their own: what a collective in flight takes from others.
// `hold`: as many multiprocessors as it has blocks, by their shared memory. `stream`: device memory, read and written.
// Both end by themselves at a deadline, so that nothing that goes wrong here can hold the GPU.
#include <cuda_runtime.h>

__device__ unsigned long long now_ns() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// The flag lies in device memory and one thread of a block asks for it: threads that all read it in the host's memory
// fill the link over which the GPU fetches its work, and a matmul beside 24 of them took 20 times as long.
__global__ void hold_kernel(volatile int* stop, unsigned long long limit_ns) {
  const unsigned long long end = now_ns() + limit_ns;
  while (!*stop && now_ns() < end) __nanosleep(10000);
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

static int* stop;
static float4* buffer;
static unsigned long long* moved_device;
static cudaStream_t stream, stopping;
static const size_t BUFFER = (size_t)1 << 30;

extern "C" int prepare() {
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) return 1;
  if (cudaStreamCreateWithFlags(&stopping, cudaStreamNonBlocking)) return 2;
  if (cudaMalloc(&stop, sizeof(*stop))) return 3;
  if (cudaMalloc(&buffer, BUFFER) || cudaMalloc(&moved_device, sizeof(*moved_device))) return 4;
  return cudaFuncSetAttribute(hold_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024);
}

extern "C" int begin(int held, int streaming, double limit_s) {
  const unsigned long long limit = (unsigned long long)(limit_s * 1e9);
  cudaMemsetAsync(stop, 0, sizeof(*stop), stream);
  cudaMemsetAsync(moved_device, 0, sizeof(*moved_device), stream);
  if (held) hold_kernel<<<held, 1, 200 * 1024, stream>>>(stop, limit);
  if (streaming) stream_kernel<<<streaming, 512, 0, stream>>>(stop, limit, buffer, BUFFER / sizeof(float4), moved_device);
  return cudaGetLastError();
}

extern "C" double finish() {
  unsigned long long moved = 0;
  if (cudaMemsetAsync(stop, 1, sizeof(*stop), stopping)) return -1;
  if (cudaStreamSynchronize(stream)) return -1;
  cudaMemcpy(&moved, moved_device, sizeof(moved), cudaMemcpyDeviceToHost);
  return (double)moved;
}
