// receive: the chosen tokens in local-expert order.
//   moves    each token's row (and scales) once out of the window, once per choice into rows; where it went, for reply
//   launch   kCtas CTAs of 256 threads; a warp copies a segment of a token's row; one more CTA writes the offsets
//   order    after arrive's acquire, on the same stream; the slots stay ours until reply
//   waits    let in early, for arrive's end, before it touches memory. With a tag, of a server: until the tag is there
//            (acquire, by a thread of each CTA), and at its own end for arrive's, so that what follows is behind both.
//            Arrive waits for nothing any more by then, so neither wait has a deadline, as a kernel boundary has none
//   fails    a position outside what the header announced: that region is closed; more rows than the bucket: error
//            record
#include "float8.cuh"
#include "item.cuh"
#include "kernels.h"

namespace afd {
namespace {

constexpr int kThreads = 256;
constexpr int kCtas = 264;
constexpr int kUnroll = 4;

// The row of one choice, or -1. An index from the wire is never used before it is checked.
__device__ int32_t place(const DeviceControl& c, int32_t experts, const ItemToken& at, int2 position, bool& refused) {
  if (position.x == -1) return -1;
  const bool local = position.x >= 0 && position.x < experts;
  const int64_t e = at.slot * c.geometry.local_experts + (local ? position.x : 0);
  const int32_t count = load_here(&c.counts[e]), first = load_here(&c.first[e]);
  if (local && position.y >= 0 && position.y < count) return first + position.y;
  refused = true;
  c.refused[at.slot] = int64_t{1} << 32 | static_cast<uint32_t>(position.x);
  return -1;
}

__device__ Choices place_choices(const DeviceControl& c, int32_t experts, const ItemToken& at, bool& refused) {
  const int32_t k = static_cast<int32_t>(threadIdx.x % 32), topk = static_cast<int32_t>(c.geometry.topk);
  const Claim claim(c, at);
  const auto* positions = reinterpret_cast<const int2*>(Slot(c.window, c.layout, at.slot).position) + at.token * topk;
  const int2 none = make_int2(-1, -1);
  const int2 a = k < topk && at.routed != 0 ? positions[k] : none;
  const int2 b = k + 32 < topk && at.routed != 0 ? positions[k + 32] : none;
  if (!claim.current_in_warp(at)) return {-1, -1};
  return {place(c, experts, at, a, refused), place(c, experts, at, b, refused)};
}

// Closes the item's regions that carry a mark, whoever left it; a mark that is gone was acted on by another thread.
// Behind all else, see "Speed" in device.cuh.
__device__ __noinline__ void close_refused(const DeviceControl& c, const int32_t* words) {
  const Item item(words);
  for (int32_t i = 0; i < item.count; ++i) {
    const ItemToken at = item.at(c, i);
    const int64_t mark = c.refused[at.slot];
    if (mark == 0) continue;
    ErrorRecord r = error_at(Kind::Protocol, Op::receive, item.layer, at.region, at.stage, at.ring, at.sequence);
    name_word(r, Field::position, -1, static_cast<int32_t>(mark));
    if (load_relaxed(&c.region[at.region]) == kAlive) close_region(c, r);
    c.refused[at.slot] = 0;
  }
}

// Cumulative ends of the experts' rows, by one CTA.
__device__ void write_offsets(const DeviceControl& c, int32_t experts, const Item& item, bool current,
                              int32_t* offsets) {
  const int64_t last = current ? item.at(c, item.count - 1).slot * c.geometry.local_experts : 0;
  for (int32_t e = threadIdx.x; e < experts; e += kThreads)
    // Within an expert the last slot's rows end where the expert's do.
    offsets[e] = current ? c.first[last + e] + c.counts[last + e] : 0;
}

template <bool kScales>
__device__ void gather(const DeviceControl& c, const int32_t* words, int4* rows, float* scales, int64_t capacity,
                       int32_t* offsets, int32_t experts, uint32_t vectors) {
  const Geometry& g = c.geometry;
  const int32_t generation = load_here(&c.state->generation);
  const Item item(words);
  // The last term holds for every item with a slot; its head and first slot are waited for here, at once.
  const bool current = (item.count > 0) & (item.generation == generation) & (item.slot[1].y >= 0);
  if (blockIdx.x == kCtas) return write_offsets(c, experts, item, current && item.rows <= capacity, offsets);
  if (!current) return;
  if (item.rows > capacity) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      ErrorRecord r = error_at(Kind::Argument, Op::receive, item.layer, -1, -1, -1, -1);
      name_word(r, Field::rows, capacity, item.rows);
      fail(c, r);
    }
    return;
  }
  const Units units(item.tokens(), vectors, blockIdx.x, kCtas);
  const uint32_t lane = threadIdx.x % 32;
  bool refused = false;
  for (uint32_t unit = units.first; unit < units.count; unit += units.stride) {
    const ItemToken at = item.token(c, units.row(unit));
    const Slot slot(c.window, c.layout, at.slot);
    const uint32_t begin = units.begin(unit), end = units.end(unit);
    const int4* from = reinterpret_cast<const int4*>(slot.payload) + at.token * vectors;
    int4 data[kUnroll];
    const auto load = [&](uint32_t v) {
      const int4* p = from + v;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (v + 32 * u < end) data[u] = p[32 * u];
    };
    load(begin + lane);  // before the plan is read: they do not depend on each other
    [[maybe_unused]] float factor = 0.0f;
    [[maybe_unused]] const uint32_t each = vectors / kBlockLanes, last = end / kBlockLanes;
    [[maybe_unused]] const auto load_factor = [&](uint32_t s) {
      if (s < last) factor = slot.scale[at.token * each + s];
    };
    if constexpr (kScales) load_factor(begin / kBlockLanes + lane);
    const Choices choices = place_choices(c, experts, at, refused);
    if (begin == 0) {  // for reply
      if (lane < g.topk) rows_of(c, at)[lane] = choices.row[0];
      if (lane + 32 < g.topk) rows_of(c, at)[lane + 32] = choices.row[1];
    }
    for (uint32_t v0 = begin; v0 < end; v0 += 32 * kUnroll) {
      const uint32_t v = v0 + lane;
      if (v0 != begin) load(v);
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        const int32_t row = half == 0 ? choices.row[0] : choices.row[1];
        for (uint32_t left = __ballot_sync(kWarp, row >= 0); left != 0; left &= left - 1) {
          int4* to =
              rows + static_cast<int64_t>(__shfl_sync(kWarp, row, __ffs(static_cast<int>(left)) - 1)) * vectors + v;
#pragma unroll
          for (int u = 0; u < kUnroll; ++u)
            if (v + 32 * u < end) to[32 * u] = data[u];
        }
      }
    }
    if constexpr (kScales) {
      for (uint32_t s0 = begin / kBlockLanes; s0 < last; s0 += 32) {
        const uint32_t s = s0 + lane;
        if (s0 != begin / kBlockLanes) load_factor(s);
#pragma unroll
        for (int half = 0; half < 2; ++half)
          for (uint32_t left = __ballot_sync(kWarp, choices.row[half] >= 0); left != 0; left &= left - 1) {
            const int64_t row = __shfl_sync(kWarp, choices.row[half], __ffs(static_cast<int>(left)) - 1);
            if (s < last) scales[row * each + s] = factor;
          }
      }
    }
  }
  if (refused) close_refused(c, words);
}

template <bool kScales>
__global__ void __launch_bounds__(kThreads)
    receive_kernel(const __grid_constant__ DeviceControl c, const int32_t* words, int4* rows, float* scales,
                   int64_t capacity, int32_t* offsets, int32_t tag, uint32_t vectors) {
  const int32_t experts = c.local_experts();  // read here, before the wait
  if (tag == 0) {
    await_previous();
  } else {
    // A later tag, of an arrive that should have waited on the same stream, is no reason to wait for ever.
    const auto behind = [tag](int32_t ready) { return static_cast<int32_t>(static_cast<uint32_t>(ready) - tag) < 0; };
    if (threadIdx.x == 0)
      while (behind(load_acquire_gpu(&c.state->ready))) {
      }
    __syncthreads();
  }
  gather<kScales>(c, words, rows, scales, capacity, offsets, experts, vectors);
  if (tag != 0) await_previous();
}

}  // namespace

cudaError_t launch_receive(const DeviceControl& c, const int32_t* item, char* rows, float* scales, int64_t capacity,
                           int32_t* offsets, int32_t tag, cudaStream_t stream) {
  const auto kernel = scales_per_row(c.geometry) > 0 ? receive_kernel<true> : receive_kernel<false>;
  return launch_behind(kernel, kCtas + 1, kThreads, stream, c, item, reinterpret_cast<int4*>(rows), scales, capacity,
                       offsets, tag, static_cast<uint32_t>(payload_vectors(c.geometry)));
}

cudaError_t receive_begins_early(bool* can) {
  cudaFuncAttributes found;
  const cudaError_t e = cudaFuncGetAttributes(&found, receive_kernel<false>);
  *can = e == cudaSuccess && found.ptxVersion >= 90;
  return e;
}

cudaError_t preload_receive() {
  cudaFuncAttributes a;
  const cudaError_t e = cudaFuncGetAttributes(&a, receive_kernel<false>);
  return e == cudaSuccess ? cudaFuncGetAttributes(&a, receive_kernel<true>) : e;
}

}  // namespace afd
