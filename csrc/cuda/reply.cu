// reply: each token's weighted sum over this rank's own experts, back to the A rank that sent it.
//   moves    one row per (token, choice) in, one row per token that has any out, into the A rank's slot
//   launch   kCtas CTAs of 256 threads; a warp sums a segment of a token's row
//   order    rows, headers -> __syncthreads -> done++ (acq_rel.gpu) ; last CTA: dispatch flag to EMPTY, taken cleared,
//            then the reply flag (release.sys): a reset after the publish could erase the A rank's next dispatch
//   waits    never
//   fails    an item older than the deadline: that region is closed, the others are answered
#include "item.cuh"
#include "kernels.h"

namespace afd {
namespace {

constexpr int kThreads = 256;
constexpr int kCtas = 264;
constexpr int kRows = 8;

// What decides whether slot i of the item may be answered.
struct Answer {
  ItemToken at;
  Claim claim;
  int64_t since;
  __device__ Answer(const DeviceControl& c, const Item& item, int32_t i)
      : at(item.at(c, i)), claim(c, at), since(c.taken[at.slot].at) {}
};

__device__ void write_header(const DeviceControl& c, const Item& item, int32_t i) {
  const Answer answer(c, item, i);
  const ItemToken& at = answer.at;
  if (!answer.claim.current(at)) return;
  *Slot(peer_window(c, at.region), c.layout, c.slot(c.role_rank, at.stage, at.ring)).header = {
      kHeaderMagic, kWireVersion, item.generation, item.layer, item.tokens_of(i), 0, at.sequence, at.routed, 0};
  count_up(&c.bytes_sent[at.region], sizeof(SlotHeader));
}

// Answers one slot, by one thread.
__device__ void publish(const DeviceControl& c, const Item& item, const Answer& answer) {
  const ItemToken& at = answer.at;
  if (answer.claim.state != kAlive) return;
  if (answer.claim.taken != at.sequence) {
    fail(c, error_at(Kind::Stale, Op::reply, item.layer, -1, at.stage, at.ring, at.sequence));
    return;
  }
  if (global_ns() - answer.since > c.deadline_ns) {
    close_region(c, error_at(Kind::Timeout, Op::reply, item.layer, at.region, at.stage, at.ring, at.sequence));
    return;
  }
  store_relaxed(flag_of(c.window, c.layout, at.slot), kEmpty);
  c.taken[at.slot].sequence = -1;
  store_release(flag_of(peer_window(c, at.region), c.layout, c.slot(c.role_rank, at.stage, at.ring)), kReady);
  count_up(&c.state->counters[k_replies], 1);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    reply_kernel(const __grid_constant__ DeviceControl c, DeviceRows expert_out, const int32_t* words) {
  constexpr int N = Elements<T>::kPerVector;
  const Geometry& g = c.geometry;
  const int32_t generation = c.state->generation;
  const bool failed = has_failed(c);
  const Item item(words);
  const bool fits = item.rows <= expert_out.count;
  // The same in every thread of the grid, or CTAs would disagree on who takes part: reset() drains, so the generation
  // stands still; `failed` does not, and only those who publish look at it.
  const bool current = item.count > 0 && fits && item.generation == generation;
  if (item.count > 0 && !fits && blockIdx.x == 0 && threadIdx.x == 0) {
    ErrorRecord r = error_at(Kind::Argument, Op::reply, item.layer, -1, -1, -1, -1);
    name_word(r, Field::rows, expert_out.count, item.rows);
    fail(c, r);
  }
  if (!current) return;
  const Units units(item.tokens(), g.hidden / N, blockIdx.x, gridDim.x);
  if (blockIdx.x >= units.ctas) return;
  const int lane = threadIdx.x % 32;
  const Answer mine(c, item, lane < item.count ? lane : 0);  // asked for now, used at the end
  if (blockIdx.x == 0)                                       // by the last warps, which have the least else to do
    for (int32_t i = kThreads - 1 - threadIdx.x; i < item.count; i += kThreads) write_header(c, item, i);
  for (uint32_t unit = units.first; unit < units.count; unit += units.stride) {
    const ItemToken at = item.token(c, units.row(unit));
    const float* weights = Slot(c.window, c.layout, at.slot).weight + at.token * g.topk;
    const int32_t* placed = rows_of(c, at);
    const Claim claim(c, at);
    const bool first = lane < g.topk && at.routed != 0, second = lane + 32 < g.topk && at.routed != 0;
    const float weight[2] = {first ? weights[lane] : 0.0f, second ? weights[lane + 32] : 0.0f};
    Choices choices{first ? placed[lane] : -1, second ? placed[lane + 32] : -1};
    if (!claim.current_in_warp(at)) continue;
    // Also for an item that was never received: a row outside expert_out is not read.
    const uint32_t live[2] = {__ballot_sync(kWarp, choices.row[0] >= 0 && choices.row[0] < item.rows),
                              __ballot_sync(kWarp, choices.row[1] >= 0 && choices.row[1] < item.rows)};
    if ((live[0] | live[1]) == 0) continue;
    T* to = reinterpret_cast<T*>(
                Slot(peer_window(c, at.region), c.layout, c.slot(c.role_rank, at.stage, at.ring)).payload) +
            at.token * g.hidden;
    const uint32_t begin = units.begin(unit), end = units.end(unit);
    for (uint32_t v0 = begin; v0 < end; v0 += 32) {
      const uint32_t v = v0 + lane;
      float acc[N];
#pragma unroll
      for (int j = 0; j < N; ++j) acc[j] = 0.0f;
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        const float weight_of = half == 0 ? weight[0] : weight[1];
        const int32_t row_of = half == 0 ? choices.row[0] : choices.row[1];
        for (uint32_t left = half == 0 ? live[0] : live[1]; left != 0;) {
          // kRows rows at a time, so that their loads overlap; added one after the other, in choice order.
          int4 data[kRows];
          float w[kRows];
          int n = 0;
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            if (left == 0) break;
            const int k = __ffs(static_cast<int>(left)) - 1;
            left &= left - 1;
            w[i] = __shfl_sync(kWarp, weight_of, k);
            const int64_t row = __shfl_sync(kWarp, row_of, k);
            if (v < end)
              data[i] =
                  reinterpret_cast<const int4*>(static_cast<const T*>(expert_out.data) + row * expert_out.stride)[v];
            n = i + 1;
          }
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            if (i >= n) break;
            float part[N];
            unpack<T>(part, data[i]);
#pragma unroll
            for (int j = 0; j < N; ++j)
              acc[j] = __fadd_rn(acc[j], __fmul_rn(w[i], part[j]));  // no fma: what is added is the rounded product
          }
        }
      }
      if (v < end) store<N>(to + v * N, acc);
    }
    if (begin == 0 && lane == 0) count_up(&c.bytes_sent[at.region], g.hidden * static_cast<int64_t>(sizeof(T)));
  }
  bool spoiled;
  if (!last_cta(c, Done::reply, 0, units.ctas, false, spoiled) || failed) return;
  for (int32_t i = threadIdx.x; i < item.count; i += 32) publish(c, item, i == lane ? mine : Answer(c, item, i));
}

}  // namespace

void launch_reply(const DeviceControl& c, DeviceRows expert_out, const int32_t* item, cudaStream_t stream) {
  switch (wide_dtype(c.geometry.dtype)) {
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
