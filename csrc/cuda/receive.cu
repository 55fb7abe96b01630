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

// Cumulative ends of the experts' rows, by one CTA.
__device__ void write_offsets(const DeviceControl& c, const Item& item, bool current, int32_t* offsets) {
  const int64_t last = current ? item.at(c, item.count - 1).slot * c.geometry.local_experts : 0;
  for (int32_t e = threadIdx.x; e < c.local_experts(); e += blockDim.x)
    // Within an expert the last slot's rows end where the expert's do.
    offsets[e] = current ? c.first[last + e] + c.counts[last + e] : 0;
}

__global__ void __launch_bounds__(kThreads)
    receive_kernel(const __grid_constant__ DeviceControl c, const int32_t* words, int4* rows, int64_t capacity,
                   int32_t* offsets) {
  const Geometry& g = c.geometry;
  const int32_t generation = c.state->generation;
  const Item item(words);
  const bool current = item.count > 0 && item.generation == generation;
  if (blockIdx.x == gridDim.x - 1) write_offsets(c, item, current && item.rows <= capacity, offsets);
  if (!current) return;
  if (item.rows > capacity) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      ErrorRecord r = error_at(Kind::Argument, Op::receive, item.layer, -1, -1, -1, -1);
      r.field = static_cast<int32_t>(Field::rows);
      r.expected = capacity;
      r.seen = item.rows;
      fail(c, r);
    }
    return;
  }
  const Units units(item.tokens(), g.hidden * itemsize(g.dtype) / 16, kUnroll, blockIdx.x, gridDim.x);
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t unit = units.first; unit < units.count; unit += units.stride) {
    const ItemToken at = item.token(c, units.row(unit));
    const int4* from =
        reinterpret_cast<const int4*>(DeviceSlot(c.window, c.layout, at.slot).payload) + at.token * units.vectors;
    const uint32_t begin = units.begin(unit), end = units.end(unit);
    int4 data[kUnroll];
    const auto load = [&](uint32_t v) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (v + 32 * u < end) data[u] = from[v + 32 * u];
    };
    load(begin + lane);  // before the plan is read: they do not depend on each other
    const Choices choices(c, item, at, Op::receive);
    for (uint32_t v0 = begin; v0 < end; v0 += 32 * kUnroll) {
      const uint32_t v = v0 + lane;
      if (v0 != begin) load(v);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        for (uint32_t left = __ballot_sync(kWarp, choices.row[half] >= 0); left != 0; left &= left - 1) {
          int4* to = rows + __shfl_sync(kWarp, choices.row[half], __ffs(static_cast<int>(left)) - 1) * units.vectors;
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
