// The physical floor between two GPUs, for round_trip.py: rows stored to the peer, then one flag. No product code.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

__device__ void store_release(int* p, int v) {
  asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__global__ void put(const int4* __restrict__ from, int4* to, int64_t n, unsigned* done, int* flag) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  for (; i + 3 * step < n; i += 4 * step) {
    const int4 a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
    to[i] = a;
    to[i + step] = b;
    to[i + 2 * step] = c;
    to[i + 3 * step] = d;
  }
  for (; i < n; i += step) to[i] = from[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    if (atomicAdd(done, 1u) == gridDim.x - 1) {
      *done = 0;
      __threadfence_system();
      store_release(flag, 1);
    }
  }
}

}  // namespace

extern "C" int floor_put(const void* from, void* to, int64_t bytes, void* done, void* flag, int ctas, void* stream) {
  put<<<ctas, 512, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<const int4*>(from), static_cast<int4*>(to),
                                                           bytes / 16, static_cast<unsigned*>(done),
                                                           static_cast<int*>(flag));
  return cudaGetLastError();
}
