// arrive: wait for any slot, choose what to compute together, say so to the device (item) and to the host (mailbox).
//   moves    one flag word per slot; headers and counts of ready slots
//   launch   1 warp
//   order    flag (acquire), then header; header and counts are copied out of the window here, once
//   waits    until a slot is ready or the poll interval is over; an empty item is not an error
//   fails    a slot that breaks the protocol or a peer that ended: its region is closed, the others are served on
// The choice is csrc/cpu/arrive.cpp's: see there for why it is fair.
#include "device.cuh"
#include "kernels.h"

namespace afd {
namespace {

// Peers that ended, each acted on once, by the lane that owns it.
__device__ void watch_peers(const DeviceControl& c, bool across_pcie) {
  for (int32_t p = threadIdx.x; p < c.peers; p += 32) {
    int32_t sticky = peer_state(c, p);
    if (sticky == kAlive && across_pcie && ask_host(&c.gone[p]) != 0) sticky = kGone;
    if (sticky == kAlive || load_relaxed(&c.region[p]) != kAlive) continue;
    if (sticky == kLeft) {
      store_relaxed(&c.region[p], kLeft);
      tell_host(&c.mapped_region[p], kLeft);
    } else {
      close_region(c, peer_ended(error_at(Kind::PeerFailed, Op::arrive, -1, p, -1, -1, -1), p, sticky));
    }
  }
  __syncwarp();
}

// Checks a ready slot's header and counts and copies the counts; false (region closed) if the protocol forbids them.
__device__ bool admit(const DeviceControl& c, int64_t index, SlotHeader& h) {
  const Geometry& g = c.geometry;
  const DeviceSlot slot(c.window, c.layout, index);
  const int lane = threadIdx.x;
  h = *slot.header;  // every lane: one request
  const int64_t ring = index % g.depth, most = static_cast<int64_t>(h.num_tokens) * g.topk;
  int64_t sum = 0, worst = -1;
  for (int64_t e = lane; e < g.local_experts; e += 32) {
    const int32_t n = slot.counts[e];
    c.counts[index * g.local_experts + e] = n;
    if (n < 0 || n > (e < c.local_experts() ? most : 0)) worst = e;
    sum += n;
  }
  for (int d = 16; d > 0; d /= 2) {
    sum += __shfl_xor_sync(kWarp, sum, d);
    const int64_t other = __shfl_xor_sync(kWarp, worst, d);
    worst = other > worst ? other : worst;
  }
  ErrorRecord r = error_at(Kind::Protocol, Op::arrive, h.layer, static_cast<int32_t>(index / c.layout.slots_per_region),
                           static_cast<int32_t>(index / g.depth % g.stages), ring, h.sequence);
  const auto fails = [&r](bool bad, Field field, int64_t expected, int64_t seen) {
    if (!bad) return false;
    r.field = static_cast<int32_t>(field);
    r.expected = expected;
    r.seen = seen;
    return true;
  };
  const int32_t generation = c.state->generation;
  const bool bad = fails(h.magic != kHeaderMagic, Field::magic, kHeaderMagic, h.magic) ||
                   fails(h.version != kWireVersion, Field::version, kWireVersion, h.version) ||
                   fails(h.generation != generation, Field::generation, generation, h.generation) ||
                   fails(h.flags != 0, Field::flags, 0, h.flags) ||
                   fails(h.sequence < 0, Field::sequence, 0, h.sequence) ||
                   fails(h.sequence % g.depth != ring, Field::ring, ring, h.sequence % g.depth) ||
                   fails(h.layer < 0, Field::layer, 0, h.layer) ||
                   fails(h.num_tokens < 0 || h.num_tokens > g.tokens, Field::num_tokens, g.tokens, h.num_tokens) ||
                   fails(worst >= 0, Field::counts, most, worst) ||
                   fails(sum != h.routed || sum > most, Field::counts, h.routed, sum);
  if (bad && lane == 0) close_region(c, r);
  __syncwarp();
  return !bad;
}

// Rows stand by expert, and within an expert in item order.
__device__ void place_rows(const DeviceControl& c, const int64_t* chosen, int32_t count) {
  const int64_t width = c.geometry.local_experts;
  const int lane = threadIdx.x;
  int32_t begin = 0;
  for (int32_t e0 = 0; e0 < c.local_experts(); e0 += 32) {
    const int32_t e = e0 + lane;
    const bool mine = e < c.local_experts();
    int32_t total = 0;
    for (int32_t i = 0; mine && i < count; ++i) total += c.counts[chosen[i] * width + e];
    int32_t inclusive = total;
    for (int d = 1; d < 32; d *= 2) {
      const int32_t other = __shfl_up_sync(kWarp, inclusive, d);
      if (lane >= d) inclusive += other;
    }
    int32_t row = begin + inclusive - total;
    for (int32_t i = 0; mine && i < count; ++i) {
      c.first[chosen[i] * width + e] = row;
      row += c.counts[chosen[i] * width + e];
    }
    begin += __shfl_sync(kWarp, inclusive, 31);
  }
}

__global__ void __launch_bounds__(32) arrive_kernel(const __grid_constant__ DeviceControl c, int32_t* item) {
  extern __shared__ int64_t chosen[];  // [slots]: the item's slots
  const Geometry& g = c.geometry;
  const int lane = threadIdx.x;
  const int64_t slots = c.slots(), start = global_ns(), cursor = c.state->cursor;
  int32_t count = 0, layer = 0;
  int64_t rows = 0, next = cursor;
  for (uint32_t turn = 1;; ++turn) {
    if (turn % 16 == 1) watch_peers(c, turn % 256 == 1);
    bool left_behind = false, stop = false;
    for (int64_t base = 0; base < slots && !stop; base += 32) {
      const int64_t at = (cursor + base + lane) % slots;
      // taken first, then the flag: an answered slot must not be taken again (docs/protocol.md)
      const bool ready = base + lane < slots && c.taken[at].sequence < 0 &&
                         load_acquire(flag_of(c.window, c.layout, at)) == kReady &&
                         load_relaxed(&c.region[at / c.layout.slots_per_region]) == kAlive;
      for (uint32_t left = __ballot_sync(kWarp, ready); left != 0 && !stop; left &= left - 1) {
        const int64_t index = __shfl_sync(kWarp, at, __ffs(static_cast<int>(left)) - 1);
        SlotHeader h;
        __syncwarp();  // the lane that acquired the flag may be another
        if (load_relaxed(&c.region[index / c.layout.slots_per_region]) != kAlive || !admit(c, index, h)) continue;
        const bool fits = count == 0 || rows + h.routed <= c.rows;
        if (count > 0 && (!fits || h.layer != layer)) {
          if (!left_behind) next = index;
          left_behind = true;
          stop = !fits;
          continue;
        }
        layer = h.layer;
        rows += h.routed;
        if (lane == 0) {
          c.taken[index] = {h.sequence, global_ns(), h.layer, h.num_tokens, h.routed, 0};
          chosen[count] = index;
          int32_t* s = item + (1 + count) * kItemWords;
          s[kItemRegion] = static_cast<int32_t>(index / c.layout.slots_per_region);
          s[kItemStage] = static_cast<int32_t>(index / g.depth % g.stages);
          s[kItemRing] = static_cast<int32_t>(index % g.depth);
          s[kItemSequenceLow] = low(h.sequence);
          s[kItemSequenceHigh] = high(h.sequence);
          s[kItemTokens] = h.num_tokens;
          s[kItemRouted] = h.routed;
          s[kItemWords - 1] = 0;
        }
        ++count;
        if (!left_behind) next = (index + 1) % slots;
      }
    }
    if (count > 0) break;
    bool over = false;
    if (turn % 16 == 0) over = has_failed(c) || global_ns() - start > c.poll_ns;
    if (turn % 256 == 0) over |= ask_host(&c.mapped->abort) != 0;
    if (__any_sync(kWarp, over)) break;
  }
  // The body, a system fence, then the sequence: the host waits for the exact number.
  volatile int64_t* mail = c.mailbox + c.state->arrivals % kMailbox * kMailWords;
  if (lane == 0) {
    mail[kMailCount] = count;
    mail[kMailLayer] = layer;
    mail[kMailRows] = rows;
    const int32_t head[kItemWords] = {c.state->generation, count, layer, static_cast<int32_t>(rows)};
    for (int w = 0; w < kItemWords; ++w) item[w] = head[w];
    c.state->cursor = static_cast<int32_t>(next);
    if (count > 0) {
      c.state->counters[k_items] += 1;
      c.state->counters[k_rows] += rows;
    }
  }
  __syncwarp();
  place_rows(c, chosen, count);
  if (lane == 0) {
    __threadfence_system();
    mail[kMailSequence] = ++c.state->arrivals;
  }
}

}  // namespace

void launch_arrive(const DeviceControl& c, int32_t* item, cudaStream_t stream) {
  arrive_kernel<<<1, 32, static_cast<size_t>(c.slots()) * sizeof(int64_t), stream>>>(c, item);
}

cudaError_t preload_arrive() {
  cudaFuncAttributes a;
  return cudaFuncGetAttributes(&a, arrive_kernel);
}

}  // namespace afd
