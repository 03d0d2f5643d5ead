// Kernels that run until they are told to stop, in a stream of their own: what a collective in flight takes from others.
// `hold`: as many multiprocessors as it has blocks, by their shared memory. `stream`: device memory, read and written.
// `channel`: what a channel of NCCL does with device memory, no faster than a link would let it: how much slower a
// collective is beside something else. `host`: the copy engine, from pinned memory of the host.
// All end by themselves at a deadline, so that nothing that goes wrong here can hold the GPU.
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

// Each block moves a piece, then waits until the clock says that its link would have moved it. 64 bytes of each of its
// 512 threads are on their way at once, as in NCCL's Simple protocol. `moved` has its bytes and nanoseconds.
__global__ void channel_kernel(volatile int* stop, unsigned long long limit_ns, float4* data, size_t count,
                               double bytes_per_ns, unsigned long long* moved) {
  const size_t own = count / 2 / gridDim.x, piece = 4 * (size_t)blockDim.x;
  float4 *from = data + blockIdx.x * own, *to = data + count / 2 + blockIdx.x * own;
  const unsigned long long begin = now_ns();
  unsigned long long bytes = 0, now = begin;
  __shared__ int going;
  do {
    const size_t at = bytes / (2 * sizeof(float4)) % (own - piece) + threadIdx.x;
    float4 v[4];
    for (int k = 0; k < 4; k++) v[k] = __ldcg(from + at + k * blockDim.x);
    for (int k = 0; k < 4; k++) __stcg(to + at + k * blockDim.x, v[k]);
    bytes += 2 * piece * sizeof(float4);
    __syncthreads();
    if (threadIdx.x == 0) {
      while (bytes_per_ns * ((now = now_ns()) - begin) < bytes) __nanosleep(20);
      going = !*stop && now - begin < limit_ns;
    }
    __syncthreads();
  } while (going);
  if (threadIdx.x == 0) {
    atomicAdd(moved, bytes);
    atomicAdd(moved + 1, now - begin);
  }
}

static int* stop;
static float4* buffer;
static unsigned long long* moved_device;
static cudaStream_t stream, stopping;
static cudaEvent_t copies_begin, copies_end;
static void* pinned;
static const size_t BUFFER = (size_t)1 << 30, PINNED = (size_t)1 << 28;

extern "C" int prepare() {
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) return 1;
  if (cudaStreamCreateWithFlags(&stopping, cudaStreamNonBlocking)) return 2;
  if (cudaMalloc(&stop, sizeof(*stop))) return 3;
  if (cudaMalloc(&buffer, BUFFER) || cudaMalloc(&moved_device, 2 * sizeof(*moved_device))) return 4;
  if (cudaEventCreate(&copies_begin) || cudaEventCreate(&copies_end)) return 5;
  if (cudaMallocHost(&pinned, PINNED)) return 6;
  return cudaFuncSetAttribute(hold_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024);
}

extern "C" int begin(int held, int streaming, int channels, double bytes_per_ns, double limit_s) {
  const unsigned long long limit = (unsigned long long)(limit_s * 1e9);
  cudaMemsetAsync(stop, 0, sizeof(*stop), stream);
  cudaMemsetAsync(moved_device, 0, 2 * sizeof(*moved_device), stream);
  if (held) hold_kernel<<<held, 1, 200 * 1024, stream>>>(stop, limit);
  if (streaming) stream_kernel<<<streaming, 512, 0, stream>>>(stop, limit, buffer, BUFFER / sizeof(float4), moved_device);
  if (channels)
    channel_kernel<<<channels, 512, 0, stream>>>(stop, limit, buffer, BUFFER / sizeof(float4), bytes_per_ns, moved_device);
  return cudaGetLastError();
}

// Bytes that were moved; `block_ns`: nanoseconds in which channels did, all added up.
extern "C" double finish(double* block_ns) {
  unsigned long long moved[2] = {0, 0};
  if (cudaMemsetAsync(stop, 1, sizeof(*stop), stopping)) return -1;
  if (cudaStreamSynchronize(stream)) return -1;
  cudaMemcpy(moved, moved_device, sizeof(moved), cudaMemcpyDeviceToHost);
  *block_ns = (double)moved[1];
  return (double)moved[0];
}

extern "C" int begin_copies(int times) {
  cudaEventRecord(copies_begin, stream);
  for (int i = 0; i < times; i++) cudaMemcpyAsync(buffer, pinned, PINNED, cudaMemcpyHostToDevice, stream);
  cudaEventRecord(copies_end, stream);
  return cudaGetLastError();
}

// Bytes a second of the copies from the host, once they are done.
extern "C" double finish_copies(int times) {
  float ms = 0;
  if (cudaStreamSynchronize(stream) || cudaEventElapsedTime(&ms, copies_begin, copies_end)) return -1;
  return times * (double)PINNED / (ms * 1e-3);
}
