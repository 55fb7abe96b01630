// receive: the chosen tokens in local-expert order.
//   moves    each token's row once out of the window, once per choice into rows
//   launch   kCtas CTAs of 256 threads over (token, segment)
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

__global__ void __launch_bounds__(kThreads)
    receive_kernel(DeviceControl* c, const int32_t* item, int4* rows, int64_t capacity, int32_t* offsets) {
  const Geometry& g = c->geometry;
  const int32_t count = item[kItemCount];
  if (blockIdx.x == 0) {
    const int32_t* s = item + count * kItemWords;  // within an expert the last slot's rows end where the expert's do
    for (int32_t e = threadIdx.x; e < c->local_experts(); e += blockDim.x) {
      int32_t end = 0;
      if (count > 0) {
        const int64_t i = c->slot(s[kItemRegion], s[kItemStage], s[kItemRing]) * g.local_experts + e;
        end = c->first[i] + c->counts[i];
      }
      offsets[e] = end;
    }
  }
  if (count == 0 || item[kItemGeneration] != c->generation) return;
  if (item[kItemRows] > capacity) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      ErrorRecord r = error_at(Kind::Argument, Op::receive, item[kItemLayer], -1, -1, -1, -1);
      r.expected = capacity;
      r.seen = item[kItemRows];
      fail(c, r);
    }
    return;
  }
  const int64_t vectors = g.hidden * itemsize(g.dtype) / 16;
  const Units units(item_tokens(item), vectors);
  __shared__ int64_t row[kMaxTopk];
  for (int64_t unit = blockIdx.x; unit < units.count; unit += gridDim.x) {
    const ItemToken at = item_token(c, item, unit / units.segments);
    if (c->region[at.region] != kAlive || c->taken[at.slot].routed == 0) continue;
    const int64_t begin = unit % units.segments * units.span;
    const int64_t end = begin + units.span < vectors ? begin + units.span : vectors;
    const int4* from =
        reinterpret_cast<const int4*>(DeviceSlot(c->window, c->layout, at.slot).payload) + at.token * vectors;
    __syncthreads();
    if (threadIdx.x < g.topk) row[threadIdx.x] = row_of(c, item, at, threadIdx.x, Op::receive);
    __syncthreads();
    for (int64_t v = begin + threadIdx.x; v < end; v += blockDim.x) {
      const int4 data = from[v];
      for (int64_t k = 0; k < g.topk; ++k)
        if (row[k] >= 0) rows[row[k] * vectors + v] = data;
    }
  }
}

}  // namespace

void launch_receive(DeviceControl* c, const Geometry&, const int32_t* item, char* rows, int64_t capacity,
                    int32_t* offsets, cudaStream_t stream) {
  receive_kernel<<<kCtas, kThreads, 0, stream>>>(c, item, reinterpret_cast<int4*>(rows), capacity, offsets);
}

cudaError_t preload_receive() {
  cudaFuncAttributes a;
  return cudaFuncGetAttributes(&a, receive_kernel);
}

}  // namespace afd
