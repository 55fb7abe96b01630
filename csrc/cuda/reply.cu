// reply: each token's weighted sum over this rank's own experts, back to the A rank that sent it.
//   moves    one row per (token, choice) in, one row per token that has any out, into the A rank's slot
//   launch   kCtas CTAs of 256 threads; a warp sums a segment of a token's row
//   order    rows -> __syncthreads -> fence.sys -> done++ ; last CTA: header, dispatch flag to EMPTY, taken cleared,
//   then
//            the reply flag (release.sys): a reset after the publish could erase the A rank's next dispatch
//   waits    never
//   fails    an item older than the deadline or a bad position: that region is closed, the others are answered
#include "item.cuh"
#include "kernels.h"

namespace afd {
namespace {

constexpr int kThreads = 256;
constexpr int kCtas = 264;

// Answers slot i of the item, by one thread.
__device__ void publish(const DeviceControl& c, const int32_t* item, int32_t i) {
  const int32_t* s = item + (1 + i) * kItemWords;
  const int32_t region = s[kItemRegion], stage = s[kItemStage], ring = s[kItemRing], layer = item[kItemLayer];
  const int64_t index = c.slot(region, stage, ring), sequence = join(s[kItemSequenceLow], s[kItemSequenceHigh]);
  Taken& taken = c.taken[index];
  if (load_relaxed(&c.region[region]) != kAlive) return;
  if (taken.sequence != sequence) {
    fail(c, error_at(Kind::Stale, Op::reply, layer, -1, stage, ring, sequence));
    return;
  }
  if (global_ns() - taken.at > c.deadline_ns) {
    close_region(c, error_at(Kind::Timeout, Op::reply, layer, region, stage, ring, sequence));
    return;
  }
  const int64_t reply_slot = c.slot(c.role_rank, stage, ring);
  char* peer = peer_window(c, region);
  *DeviceSlot(peer, c.layout, reply_slot).header = {
      kHeaderMagic, kWireVersion, c.state->generation, layer, taken.num_tokens, 0, sequence, taken.routed, 0};
  store_relaxed(flag_of(c.window, c.layout, index), kEmpty);
  taken.sequence = -1;
  store_release(flag_of(peer, c.layout, reply_slot), kReady);
  count_up(&c.bytes_sent[region], sizeof(SlotHeader));
  count_up(&c.state->counters[k_replies], 1);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    reply_kernel(const __grid_constant__ DeviceControl c, DeviceRows expert_out, const int32_t* item) {
  constexpr int N = Elements<T>::kPerVector;
  const Geometry& g = c.geometry;
  const int32_t count = item[kItemCount];
  const bool fits = item[kItemRows] <= expert_out.count;
  // The same in every thread of the grid, or CTAs would disagree on who takes part: reset() drains, so the generation
  // stands still; `failed` does not, and is asked by those who publish.
  const bool current = count > 0 && fits && item[kItemGeneration] == c.state->generation;
  if (count > 0 && !fits && blockIdx.x == 0 && threadIdx.x == 0) {
    ErrorRecord r = error_at(Kind::Argument, Op::reply, item[kItemLayer], -1, -1, -1, -1);
    r.field = static_cast<int32_t>(Field::rows);
    r.expected = expert_out.count;
    r.seen = item[kItemRows];
    fail(c, r);
  }
  const Units units(current ? item_tokens(item, count) : 0, g.hidden / N, 1, blockIdx.x, gridDim.x);
  if (blockIdx.x >= units.ctas) return;
  const int lane = threadIdx.x % 32;
  for (int64_t unit = units.first; unit < units.count; unit += units.stride) {
    const ItemToken at = item_token(c, item, units.row(unit));
    if (!region_alive(c, at.region) || c.taken[at.slot].routed == 0) continue;
    const Choices choices(c, item, at, Op::reply);
    const DeviceSlot from(c.window, c.layout, at.slot);
    const float weight[2] = {lane < g.topk ? from.weight[at.token * g.topk + lane] : 0.0f,
                             lane + 32 < g.topk ? from.weight[at.token * g.topk + lane + 32] : 0.0f};
    const uint32_t live[2] = {__ballot_sync(kWarp, choices.row[0] >= 0), __ballot_sync(kWarp, choices.row[1] >= 0)};
    if ((live[0] | live[1]) == 0) continue;
    T* to = reinterpret_cast<T*>(
                DeviceSlot(peer_window(c, at.region), c.layout, c.slot(c.role_rank, at.stage, at.ring)).payload) +
            at.token * g.hidden;
    const int64_t begin = units.begin(unit), end = units.end(unit);
    for (int64_t v = begin + lane; v - lane < end; v += 32) {
      float acc[N];
#pragma unroll
      for (int j = 0; j < N; ++j) acc[j] = 0.0f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        for (uint32_t left = live[half]; left != 0;) {
          // Four rows at a time, so that their loads overlap; added one after the other, in choice order.
          int4 data[4];
          float w[4];
          int n = 0;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (left == 0) break;
            const int k = __ffs(static_cast<int>(left)) - 1;
            left &= left - 1;
            w[i] = __shfl_sync(kWarp, weight[half], k);
            const int64_t row = __shfl_sync(kWarp, choices.row[half], k);
            if (v < end)
              data[i] =
                  reinterpret_cast<const int4*>(static_cast<const T*>(expert_out.data) + row * expert_out.stride)[v];
            n = i + 1;
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (i >= n) break;
            float part[N];
            unpack<T>(part, data[i]);
#pragma unroll
            for (int j = 0; j < N; ++j) acc[j] = __fadd_rn(acc[j], __fmul_rn(w[i], part[j]));  // as the CPU: no fma
          }
        }
      }
      if (v < end) store<N>(to + v * N, acc);
    }
    if (begin == 0 && lane == 0) count_up(&c.bytes_sent[at.region], g.hidden * static_cast<int64_t>(sizeof(T)));
  }
  bool spoiled;
  if (!last_cta<true>(c, Done::reply, 0, units.ctas, false, spoiled) || !current || has_failed(c)) return;
  for (int32_t i = threadIdx.x; i < count; i += blockDim.x) publish(c, item, i);
}

}  // namespace

void launch_reply(const DeviceControl& c, DeviceRows expert_out, const int32_t* item, cudaStream_t stream) {
  switch (c.geometry.dtype) {
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
