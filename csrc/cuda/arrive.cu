// arrive: wait for any slot, choose what to compute together, say so to the device (item) and to the host (mailbox).
//   moves    one flag word per slot; headers and counts of ready slots
//   launch   1 CTA of 256 threads
//   order    flag (acquire), then header; header and counts are copied out of the window here, once
//   waits    until a slot is ready or the poll interval is over; an empty item is not an error
//   fails    a slot that breaks the protocol or a peer that ended: its region is closed, the others are served on
// The choice is csrc/cpu/arrive.cpp's: see there for why it is fair.
#include "device.cuh"
#include "kernels.h"

namespace afd {
namespace {

constexpr int kThreads = 256;

struct Choice {
  int32_t count, layer;
  int64_t rows, cursor;
  bool left_behind, stop;
};

// A peer that ended: acted on once, by the thread that owns it.
__device__ void watch_peers(DeviceControl* c, bool across_pcie) {
  for (int32_t p = threadIdx.x; p < c->peers; p += blockDim.x) {
    if (c->region[p] != kAlive) continue;
    int32_t sticky = peer_state(c, p);
    if (sticky == kAlive && across_pcie && *reinterpret_cast<volatile int32_t*>(&c->gone[p]) != 0) sticky = kGone;
    if (sticky == kLeft) {
      c->region[p] = kLeft;
      *reinterpret_cast<volatile int32_t*>(&c->mapped_region[p]) = kLeft;
    } else if (sticky != kAlive) {
      close_region(c, peer_ended(error_at(Kind::PeerFailed, Op::arrive, -1, p, -1, -1, -1), p, sticky));
    }
  }
}

// Checks a ready slot's header and counts and copies them, by the whole CTA.
__device__ bool admit(DeviceControl* c, int64_t index, SlotHeader& header) {
  const Geometry& g = c->geometry;
  const DeviceSlot slot(c->window, c->layout, index);
  __shared__ SlotHeader h;
  __shared__ unsigned long long sum;
  __shared__ int32_t worst_field;
  __shared__ int64_t expected, seen;
  const auto region = static_cast<int32_t>(index / c->layout.slots_per_region);
  const int64_t ring = index % g.depth;
  __syncthreads();
  if (threadIdx.x == 0) {
    h = *slot.header;
    sum = 0;
    worst_field = 0;
    const auto fails = [&](bool bad, Field field, int64_t want, int64_t got) {
      if (!bad) return false;
      worst_field = static_cast<int32_t>(field);
      expected = want;
      seen = got;
      return true;
    };
    (void)(fails(h.magic != kHeaderMagic, Field::magic, kHeaderMagic, h.magic) ||
           fails(h.version != kWireVersion, Field::version, kWireVersion, h.version) ||
           fails(h.generation != c->generation, Field::generation, c->generation, h.generation) ||
           fails(h.flags != 0, Field::flags, 0, h.flags) || fails(h.sequence < 0, Field::sequence, 0, h.sequence) ||
           fails(h.sequence % g.depth != ring, Field::ring, ring, h.sequence % g.depth) ||
           fails(h.layer < 0, Field::layer, 0, h.layer) ||
           fails(h.num_tokens < 0 || h.num_tokens > g.tokens, Field::num_tokens, g.tokens, h.num_tokens));
  }
  __syncthreads();
  const int64_t most = static_cast<int64_t>(h.num_tokens) * g.topk;
  if (worst_field == 0) {
    for (int64_t e = threadIdx.x; e < g.local_experts; e += blockDim.x) {
      const int32_t n = slot.counts[e];
      const int64_t limit = e < c->local_experts() ? most : 0;
      c->counts[index * g.local_experts + e] = n;
      if (n < 0 || n > limit) {
        worst_field = static_cast<int32_t>(Field::counts);
        expected = limit;
        seen = n;
      } else {
        atomicAdd(&sum, static_cast<unsigned long long>(n));
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    if (worst_field == 0 && (static_cast<int64_t>(sum) != h.routed || static_cast<int64_t>(sum) > most)) {
      worst_field = static_cast<int32_t>(Field::counts);
      expected = h.routed;
      seen = static_cast<int64_t>(sum);
    }
    if (worst_field != 0) {
      const auto stage = static_cast<int32_t>(index / g.depth % g.stages);
      ErrorRecord r = error_at(Kind::Protocol, Op::arrive, h.layer, region, stage, ring, h.sequence);
      r.field = worst_field;
      r.expected = expected;
      r.seen = seen;
      close_region(c, r);
    } else {
      c->taken[index] = {-1, 0, h.layer, h.num_tokens, h.routed, 0};
    }
  }
  __syncthreads();
  header = h;
  return worst_field == 0;
}

// Rows stand by expert, and within an expert in item order.
__device__ void place_rows(DeviceControl* c, const int32_t* item, int32_t count) {
  const Geometry& g = c->geometry;
  const int32_t experts = c->local_experts();
  __shared__ int32_t begin;
  __shared__ int32_t warp_sum[kThreads / 32];
  if (threadIdx.x == 0) begin = 0;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int32_t e0 = 0; e0 < experts; e0 += kThreads) {
    const int32_t e = e0 + static_cast<int32_t>(threadIdx.x);
    int32_t total = 0;
    for (int32_t i = 0; e < experts && i < count; ++i) {
      const int32_t* s = item + (1 + i) * kItemWords;
      total += c->counts[c->slot(s[kItemRegion], s[kItemStage], s[kItemRing]) * g.local_experts + e];
    }
    int32_t inclusive = total;
    for (int d = 1; d < 32; d *= 2) {
      const int32_t other = __shfl_up_sync(0xffffffffu, inclusive, d);
      if (lane >= d) inclusive += other;
    }
    if (lane == 31) warp_sum[warp] = inclusive;
    __syncthreads();
    int32_t row = begin + inclusive - total;
    for (int w = 0; w < warp; ++w) row += warp_sum[w];
    const int32_t end = row + total;
    for (int32_t i = 0; e < experts && i < count; ++i) {
      const int32_t* s = item + (1 + i) * kItemWords;
      const int64_t at = c->slot(s[kItemRegion], s[kItemStage], s[kItemRing]) * g.local_experts + e;
      c->first[at] = row;
      row += c->counts[at];
    }
    __syncthreads();
    if (threadIdx.x == kThreads - 1) begin = end;
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kThreads) arrive_kernel(DeviceControl* c, int32_t* item) {
  extern __shared__ uint8_t ready[];  // [slots], in scan order
  const int64_t slots = c->slots();
  const int64_t start = global_ns();
  __shared__ Choice choice;
  __shared__ bool over;
  for (uint32_t turn = 1;; ++turn) {
    const bool across_pcie = turn % 64 == 1;
    watch_peers(c, across_pcie);
    bool mine = false;
    for (int64_t i = threadIdx.x; i < slots; i += blockDim.x) {
      const int64_t index = (c->cursor + i) % slots;
      // taken first, then the flag: an answered slot must not be taken again (docs/protocol.md)
      ready[i] = c->region[index / c->layout.slots_per_region] == kAlive && c->taken[index].sequence < 0 &&
                 load_acquire(flag_of(c->window, c->layout, index)) == kReady;
      mine |= ready[i] != 0;
    }
    if (__syncthreads_or(mine)) {
      if (threadIdx.x == 0) choice = {0, 0, 0, c->cursor, false, false};
      __syncthreads();
      for (int64_t i = 0; i < slots && !choice.stop; ++i) {
        if (!ready[i]) continue;
        const int64_t index = (c->cursor + i) % slots;
        const auto region = static_cast<int32_t>(index / c->layout.slots_per_region);
        SlotHeader h;
        if (c->region[region] != kAlive || !admit(c, index, h)) continue;
        __syncthreads();
        if (threadIdx.x == 0) {
          const bool fits = choice.count == 0 || choice.rows + h.routed <= c->rows;
          if (choice.count > 0 && (!fits || h.layer != choice.layer)) {
            if (!choice.left_behind) choice.cursor = index;
            choice.left_behind = true;
            choice.stop = !fits;
          } else {
            Taken& taken = c->taken[index];
            taken.sequence = h.sequence;
            taken.at = global_ns();
            choice.layer = h.layer;
            choice.rows += h.routed;
            int32_t* s = item + (1 + choice.count++) * kItemWords;
            s[kItemRegion] = region;
            s[kItemStage] = static_cast<int32_t>(index / c->geometry.depth % c->geometry.stages);
            s[kItemRing] = static_cast<int32_t>(index % c->geometry.depth);
            s[kItemSequenceLow] = low(h.sequence);
            s[kItemSequenceHigh] = high(h.sequence);
            s[kItemTokens] = h.num_tokens;
            s[kItemRouted] = h.routed;
            s[kItemWords - 1] = 0;
            if (!choice.left_behind) choice.cursor = (index + 1) % slots;
          }
        }
        __syncthreads();
      }
      if (choice.count > 0) break;
      __syncthreads();
    }
    if (threadIdx.x == 0)
      over = *reinterpret_cast<volatile int32_t*>(&c->failed) != 0 ||
             (across_pcie && *reinterpret_cast<volatile int32_t*>(&c->mapped->abort) != 0) ||
             global_ns() - start > c->poll_ns;
    __syncthreads();
    if (over) {
      if (threadIdx.x == 0) choice = {0, 0, 0, c->cursor, false, false};
      __syncthreads();
      break;
    }
  }
  place_rows(c, item, choice.count);
  if (threadIdx.x == 0) {
    c->cursor = static_cast<int32_t>(choice.cursor);
    const int32_t head[kItemWords] = {c->generation, choice.count, choice.layer, static_cast<int32_t>(choice.rows)};
    for (int w = 0; w < kItemWords; ++w) item[w] = head[w];
    if (choice.count > 0) {
      c->counters[k_items] += 1;
      c->counters[k_rows] += choice.rows;
    }
    // The body, a system fence, then the sequence: the host waits for the exact number.
    volatile int64_t* mail = c->mailbox + c->arrivals % kMailbox * kMailWords;
    mail[kMailCount] = choice.count;
    mail[kMailLayer] = choice.layer;
    mail[kMailRows] = choice.rows;
    __threadfence_system();
    mail[kMailSequence] = ++c->arrivals;
  }
}

}  // namespace

void launch_arrive(DeviceControl* c, const Geometry&, int64_t slots, int32_t* item, cudaStream_t stream) {
  arrive_kernel<<<1, kThreads, static_cast<size_t>(slots), stream>>>(c, item);
}

cudaError_t preload_arrive() {
  cudaFuncAttributes a;
  return cudaFuncGetAttributes(&a, arrive_kernel);
}

}  // namespace afd
