// receive: the chosen tokens in local-expert order.
//   moves    each token's row once out of the window, once per choice into rows
//   launch   kCtas CTAs of 256 threads; a warp copies a segment of a token's row
//   order    after arrive's acquire, on the same stream; the slots stay ours until reply
//   waits    never
//   fails    a position outside what the header announced: that region is closed; more rows than the bucket: error
//   record
#include "item.cuh"
#include "kernels.h"

namespace afd {
namespace {

constexpr int kThreads = 256;
constexpr int kCtas = 264;
constexpr int kUnroll = 4;

__global__ void __launch_bounds__(kThreads) receive_kernel(const __grid_constant__ DeviceControl c, const int32_t* item,
                                                           int4* rows, int64_t capacity, int32_t* offsets) {
  const Geometry& g = c.geometry;
  const int32_t count = item[kItemCount];
  const bool fits = item[kItemRows] <= capacity;
  if (blockIdx.x == gridDim.x - 1) {
    const int32_t* s = item + count * kItemWords;  // within an expert the last slot's rows end where the expert's do
    for (int32_t e = threadIdx.x; e < c.local_experts(); e += blockDim.x) {
      int32_t end = 0;
      if (count > 0 && fits && item[kItemGeneration] == c.state->generation) {
        const int64_t i = c.slot(s[kItemRegion], s[kItemStage], s[kItemRing]) * g.local_experts + e;
        end = c.first[i] + c.counts[i];
      }
      offsets[e] = end;
    }
  }
  if (count == 0 || item[kItemGeneration] != c.state->generation) return;
  if (!fits) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      ErrorRecord r = error_at(Kind::Argument, Op::receive, item[kItemLayer], -1, -1, -1, -1);
      r.field = static_cast<int32_t>(Field::rows);
      r.expected = capacity;
      r.seen = item[kItemRows];
      fail(c, r);
    }
    return;
  }
  const int64_t vectors = g.hidden * itemsize(g.dtype) / 16;
  const Units units(item_tokens(item, count), vectors, kUnroll, blockIdx.x, gridDim.x);
  const int lane = threadIdx.x % 32;
  for (int64_t unit = units.first; unit < units.count; unit += units.stride) {
    const ItemToken at = item_token(c, item, units.row(unit));
    if (!region_alive(c, at.region) || c.taken[at.slot].routed == 0) continue;
    const Choices choices(c, item, at, Op::receive);
    const int4* from =
        reinterpret_cast<const int4*>(DeviceSlot(c.window, c.layout, at.slot).payload) + at.token * vectors;
    const int64_t end = units.end(unit);
    for (int64_t v = units.begin(unit) + lane; v - lane < end; v += 32 * kUnroll) {
      int4 data[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (v + 32 * u < end) data[u] = from[v + 32 * u];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        for (uint32_t left = __ballot_sync(kWarp, choices.row[half] >= 0); left != 0; left &= left - 1) {
          int4* to = rows + __shfl_sync(kWarp, choices.row[half], __ffs(static_cast<int>(left)) - 1) * vectors;
#pragma unroll
          for (int u = 0; u < kUnroll; ++u)
            if (v + 32 * u < end) to[v + 32 * u] = data[u];
        }
      }
    }
  }
}

}  // namespace

void launch_receive(const DeviceControl& c, const int32_t* item, char* rows, int64_t capacity, int32_t* offsets,
                    cudaStream_t stream) {
  receive_kernel<<<kCtas, kThreads, 0, stream>>>(c, item, reinterpret_cast<int4*>(rows), capacity, offsets);
}

cudaError_t preload_receive() {
  cudaFuncAttributes a;
  return cudaFuncGetAttributes(&a, receive_kernel);
}

}  // namespace afd
