// sticky: a host's word to all peers of a window: this rank has left, or has failed.
//   moves    one word per peer
//   launch   1 CTA, on a stream of the host's own, beside whatever waits
//   waits    never
#include "device.cuh"
#include "kernels.h"

namespace afd {

cudaError_t preload_plan();
cudaError_t preload_dispatch();
cudaError_t preload_combine();
cudaError_t preload_arrive();
cudaError_t preload_receive();
cudaError_t preload_reply();
cudaError_t preload_rehearsal();

namespace {

__global__ void sticky_kernel(const __grid_constant__ DeviceControl c, int32_t sticky) {
  if (sticky == kPoisoned && threadIdx.x == 0) fail(c, error_at(Kind::Failed, Op::host, -1, -1, -1, -1, -1));
  // A graph that is replayed after close() must find the window stopped: its memory may be another's by then.
  if (sticky == kLeft && threadIdx.x == 0) atomicCAS(&c.state->failed, 0, 1 + c.peers);
  for (int32_t p = threadIdx.x; p < c.peers; p += blockDim.x) {
    int32_t* w = sticky_of(peer_window(c, p), c.layout, c.role_rank);
    atomicMax_system(w, sticky);  // a poison must not become "left"
  }
}

}  // namespace

void launch_sticky(const DeviceControl& c, int32_t sticky, cudaStream_t stream) {
  sticky_kernel<<<1, 64, 0, stream>>>(c, sticky);
}

cudaError_t preload() {
  cudaFuncAttributes a;
  cudaError_t e = cudaFuncGetAttributes(&a, sticky_kernel);
  for (auto one : {preload_plan, preload_dispatch, preload_combine, preload_arrive, preload_receive, preload_reply,
                   preload_rehearsal})
    if (e == cudaSuccess) e = one();
  return e;
}

}  // namespace afd
