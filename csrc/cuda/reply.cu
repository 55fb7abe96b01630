// reply: each token's weighted sum over this rank's own experts, back to the A rank that sent it.
//   moves    one row per (token, choice) in, one row per token that has any out, into the A rank's slot
//   launch   kCtas CTAs of 256 threads over (token, segment)
//   order    rows -> __syncthreads -> fence.sys -> done++ ; last CTA: header, dispatch flag to EMPTY, taken cleared,
//            fence.sys, reply flag (release.sys): a reset after the publish could erase the A rank's next dispatch
//   waits    never
//   fails    an item older than the deadline or a bad position: that region is closed, the others are answered
#include "item.cuh"
#include "kernels.h"

namespace afd {
namespace {

constexpr int kThreads = 256;
constexpr int kCtas = 132;

// Answers slot i of the item, by one thread.
__device__ void publish(DeviceControl* c, const int32_t* item, int32_t i) {
  const int32_t* s = item + (1 + i) * kItemWords;
  const int32_t region = s[kItemRegion], stage = s[kItemStage], ring = s[kItemRing];
  const int64_t index = c->slot(region, stage, ring), sequence = join(s[kItemSequenceLow], s[kItemSequenceHigh]);
  Taken& taken = c->taken[index];
  if (*reinterpret_cast<volatile int32_t*>(&c->region[region]) != kAlive) return;
  if (taken.sequence != sequence) {
    fail(c, error_at(Kind::Stale, Op::reply, item[kItemLayer], -1, stage, ring, sequence));
    return;
  }
  if (global_ns() - taken.at > c->deadline_ns) {
    close_region(c, error_at(Kind::Timeout, Op::reply, item[kItemLayer], region, stage, ring, sequence));
    return;
  }
  const int64_t reply_slot = c->slot(c->role_rank, stage, ring);
  *DeviceSlot(c->peer[region], c->layout, reply_slot).header = {
      kHeaderMagic, kWireVersion, c->generation, item[kItemLayer], taken.num_tokens, 0, sequence, taken.routed, 0};
  atomicAdd(reinterpret_cast<unsigned long long*>(&c->bytes_sent[region]),
            static_cast<unsigned long long>(sizeof(SlotHeader)));
  atomicAdd(reinterpret_cast<unsigned long long*>(&c->counters[k_replies]), 1ull);
  store_relaxed(flag_of(c->window, c->layout, index), kEmpty);
  taken.sequence = -1;
  __threadfence_system();
  store_release(flag_of(c->peer[region], c->layout, reply_slot), kReady);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) reply_kernel(DeviceControl* c, DeviceRows expert_out, const int32_t* item) {
  constexpr int N = Elements<T>::kPerVector;
  const Geometry& g = c->geometry;
  const bool current = item[kItemCount] > 0 && item[kItemGeneration] == c->generation && c->failed == 0;
  const int64_t vectors = g.hidden / N;
  const Units units(current ? item_tokens(item) : 0, vectors);
  __shared__ int64_t row[kMaxTopk];
  __shared__ float weight[kMaxTopk];
  __shared__ int32_t any;
  for (int64_t unit = blockIdx.x; unit < units.count; unit += gridDim.x) {
    const ItemToken at = item_token(c, item, unit / units.segments);
    if (c->region[at.region] != kAlive || c->taken[at.slot].routed == 0) continue;
    const int64_t begin = unit % units.segments * units.span;
    const int64_t end = begin + units.span < vectors ? begin + units.span : vectors;
    const DeviceSlot from(c->window, c->layout, at.slot);
    T* to = reinterpret_cast<T*>(
                DeviceSlot(c->peer[at.region], c->layout, c->slot(c->role_rank, at.stage, at.ring)).payload) +
            at.token * g.hidden;
    __syncthreads();
    if (threadIdx.x == 0) any = 0;
    __syncthreads();
    if (threadIdx.x < g.topk) {  // kMaxTopk is checked at construction
      row[threadIdx.x] = row_of(c, item, at, threadIdx.x, Op::reply);
      weight[threadIdx.x] = from.weight[at.token * g.topk + threadIdx.x];
      if (row[threadIdx.x] >= 0) any = 1;
    }
    __syncthreads();
    if (any == 0) continue;
    for (int64_t v = begin + threadIdx.x; v < end; v += blockDim.x) {
      float acc[N];
#pragma unroll
      for (int j = 0; j < N; ++j) acc[j] = 0.0f;
      for (int64_t k = 0; k < g.topk; ++k) {
        if (row[k] < 0) continue;
        float part[N];
        load<N>(part, static_cast<const T*>(expert_out.data) + row[k] * expert_out.stride + v * N);
        const float w = weight[k];
#pragma unroll
        for (int j = 0; j < N; ++j) acc[j] = __fadd_rn(acc[j], __fmul_rn(w, part[j]));  // as the CPU does: no fma
      }
      store<N>(to + v * N, acc);
    }
    if (begin == 0 && threadIdx.x == 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(&c->bytes_sent[at.region]),
                static_cast<unsigned long long>(vectors * 16));
  }
  bool spoiled;
  if (!last_cta(c, Done::reply, 0, false, spoiled) || !current) return;
  for (int32_t i = threadIdx.x; i < item[kItemCount]; i += blockDim.x) publish(c, item, i);
}

}  // namespace

void launch_reply(DeviceControl* c, const Geometry& g, DeviceRows expert_out, const int32_t* item,
                  cudaStream_t stream) {
  switch (g.dtype) {
    case k_float32:
      reply_kernel<float><<<kCtas, kThreads, 0, stream>>>(c, expert_out, item);
      break;
    case k_bfloat16:
      reply_kernel<__nv_bfloat16><<<kCtas, kThreads, 0, stream>>>(c, expert_out, item);
      break;
    default:
      reply_kernel<__half><<<kCtas, kThreads, 0, stream>>>(c, expert_out, item);
  }
}

cudaError_t preload_reply() {
  cudaFuncAttributes a;
  cudaError_t e = cudaFuncGetAttributes(&a, reply_kernel<float>);
  if (e == cudaSuccess) e = cudaFuncGetAttributes(&a, reply_kernel<__nv_bfloat16>);
  if (e == cudaSuccess) e = cudaFuncGetAttributes(&a, reply_kernel<__half>);
  return e;
}

}  // namespace afd
