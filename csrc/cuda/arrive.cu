// arrive: wait for any slot, choose what to compute together, say so to the device (item) and to the host (mailbox).
//   moves    one flag word per slot; headers and counts of ready slots
//   launch   1 warp
//   order    flag (acquire), then header; header and counts are copied out of the window here, once. The mailbox needs
//            no fence: every word of it says which item it belongs to. It is written before the item's places are:
//            what the host launches for it runs after this kernel
//   waits    until a slot is ready (and `linger` longer for more) or the poll interval is over; an empty item is not an
//            error
//   fails    a slot that breaks the protocol or a peer that ended: its region is closed, the others are served on
// The choice is csrc/cpu/arrive.cpp's: see there for why it is fair.
#include "device.cuh"
#include "kernels.h"

namespace afd {
namespace {

constexpr int kTogether = 8;  // loads of a lane under way at a time

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
      close_region(c, ended(error_at(Kind::PeerFailed, Op::arrive, -1, p, -1, -1, -1), p, sticky));
    }
  }
  __syncwarp();
}

// By one lane: a flag that is neither EMPTY nor READY.
__device__ void refuse_flag(const DeviceControl& c, uint32_t index, int32_t seen) {
  const uint32_t per_region = static_cast<uint32_t>(c.layout.slots_per_region), depth = c.geometry.depth;
  const uint32_t region = index / per_region, within = index % per_region;
  if (load_relaxed(&c.region[region]) != kAlive) return;
  const ErrorRecord r = where(Op::arrive, -1, static_cast<int32_t>(within / depth), within % depth, -1);
  close_region(c, bad_flag(r, static_cast<int32_t>(region), seen));
}

// What the choice needs beside the window, in shared memory.
struct Choosing {
  int64_t* chosen;  // [slots]: the item's
  int32_t* total;   // [local_experts]: rows of the item so far
  int32_t* counts;  // [local_experts]: of the slot that is looked at; at the end, where an expert's rows begin
  __device__ Choosing(const DeviceControl& c, void* memory) {
    chosen = static_cast<int64_t*>(memory);
    total = reinterpret_cast<int32_t*>(chosen + c.slots());
    counts = total + c.geometry.local_experts;
  }
};

// Checks a ready slot's header and counts; false (region closed) if the protocol forbids them, or it was closed before.
__device__ bool admit(const DeviceControl& c, int64_t index, int32_t generation, const Choosing& m, SlotHeader& h) {
  const Geometry& g = c.geometry;
  const Slot slot(c.window, c.layout, index);
  const int lane = threadIdx.x;
  const uint32_t region = static_cast<uint32_t>(index) / static_cast<uint32_t>(c.layout.slots_per_region);
  const uint32_t within = static_cast<uint32_t>(index) % static_cast<uint32_t>(c.layout.slots_per_region);
  const uint32_t depth = static_cast<uint32_t>(g.depth);
  const int32_t state = load_relaxed(&c.region[region]);
  h = *slot.header;  // every lane: one request
  int32_t n[kTogether];
  const auto load = [&](int32_t e) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (e + 32 * i < g.local_experts) n[i] = slot.counts[e + 32 * i];
  };
  load(lane);  // does not wait for the header
  const int64_t ring = within % depth, most = static_cast<int64_t>(h.num_tokens) * g.topk;
  int64_t mine = 0;
  int32_t worst = -1;
  for (int32_t first = lane; first < g.local_experts; first += 32 * kTogether) {
    if (first != lane) load(first);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int32_t e = first + 32 * i;
      if (e >= g.local_experts) break;
      m.counts[e] = n[i];
      if (n[i] < 0 || n[i] > (e < c.local_experts() ? most : 0)) worst = e;
      mine += n[i];
    }
  }
  // Over the warp in two parts that cannot overflow: a count is less than 2^31, a lane has at most 2^7 of them.
  const int64_t sum = (static_cast<int64_t>(__reduce_add_sync(kWarp, static_cast<uint32_t>(mine >> 20))) << 20) +
                      __reduce_add_sync(kWarp, static_cast<uint32_t>(mine & 0xfffff));
  worst = __reduce_max_sync(kWarp, worst);
  __syncwarp();
  if (!__all_sync(kWarp, state == kAlive)) return false;
  ErrorRecord r = error_at(Kind::Protocol, Op::arrive, h.layer, static_cast<int32_t>(region),
                           static_cast<int32_t>(within / depth), ring, h.sequence);
  const auto fails = [&r](bool bad, Field field, int64_t expected, int64_t seen) {
    if (!bad) return false;
    r.field = static_cast<int32_t>(field);
    r.expected = expected;
    r.seen = seen;
    return true;
  };
  const bool bad = fails(h.magic != kHeaderMagic, Field::magic, kHeaderMagic, h.magic) ||
                   fails(h.version != kWireVersion, Field::version, kWireVersion, h.version) ||
                   fails(h.generation != generation, Field::generation, generation, h.generation) ||
                   fails(h.flags != 0, Field::flags, 0, h.flags) ||
                   fails(h.sequence < 0, Field::sequence, 0, h.sequence) ||
                   fails(ring_of(c, h.sequence) != ring, Field::ring, ring, ring_of(c, h.sequence)) ||
                   fails(h.layer < 0 || h.layer >= g.layers, Field::layer, g.layers - 1, h.layer) ||
                   fails(h.num_tokens < 0 || h.num_tokens > g.tokens, Field::num_tokens, g.tokens, h.num_tokens) ||
                   fails(worst >= 0, Field::counts, most, m.counts[worst < 0 ? 0 : worst]) ||
                   fails(sum != h.routed || sum > most, Field::counts, h.routed, sum);
  // Every lane has loaded the header: one that a peer is just overwriting must not part them.
  const bool refused = __any_sync(kWarp, bad);
  const bool speaks = refused && __ffs(static_cast<int>(__ballot_sync(kWarp, bad))) - 1 == lane;
  if (speaks) close_region(c, r);
  __syncwarp();
  return !refused;
}

// Takes an admitted slot into the item as its n-th. Rows stand by expert, and within an expert in item order: `first`
// is relative to the expert's rows until place_rows.
__device__ void take(const DeviceControl& c, int64_t index, const SlotHeader& h, int32_t n, const Choosing& m,
                     int32_t* item) {
  const int64_t width = c.geometry.local_experts;
  for (int32_t e = threadIdx.x; e < c.local_experts(); e += 32) {
    c.counts[index * width + e] = m.counts[e];
    c.first[index * width + e] = m.total[e];
    m.total[e] += m.counts[e];
  }
  if (threadIdx.x != 0) return;
  m.chosen[n] = index;
  c.taken[index] = {h.sequence, global_ns(), h.layer, h.num_tokens, h.routed, 0};
  const int64_t region = index / c.layout.slots_per_region;
  count_up(&c.slots_taken[region], 1);
  count_up(&c.rows_taken[region], h.routed);
  const auto lane = static_cast<int32_t>(index % c.layout.slots_per_region),
             depth = static_cast<int32_t>(c.geometry.depth);
  auto* s = reinterpret_cast<int4*>(item + (1 + n) * kItemWords);
  s[0] = make_int4(static_cast<int32_t>(region), lane / depth, lane % depth, low(h.sequence));
  s[1] = make_int4(high(h.sequence), h.num_tokens, h.routed, 0);
  static_assert(kItemRegion == 0 && kItemStage == 1 && kItemRing == 2 && kItemSequenceLow == 3);
  static_assert(kItemSequenceHigh == 4 && kItemTokens == 5 && kItemRouted == 6 && kItemWords == 8);
}

// Makes `first` of the item's slots absolute.
__device__ void place_rows(const DeviceControl& c, const Choosing& m, int32_t count) {
  const int64_t width = c.geometry.local_experts;
  const int32_t experts = c.local_experts(), each = (experts + 31) / 32;
  const int lane = threadIdx.x;
  const int32_t begin = lane * each, end = min(begin + each, experts);  // this lane's experts
  int32_t inclusive = 0;
  for (int32_t e = begin; e < end; ++e) inclusive += m.total[e];
  int32_t place = -inclusive;
  for (int d = 1; d < 32; d *= 2) {
    const int32_t other = __shfl_up_sync(kWarp, inclusive, d);
    if (lane >= d) inclusive += other;
  }
  place += inclusive;
  for (int32_t e = begin; e < end; ++e) {
    m.counts[e] = place;  // where the expert's rows begin: the counts are in c.counts by now
    place += m.total[e];
  }
  __syncwarp();
  for (int32_t i = 0; i < count; ++i) {
    int32_t* first = c.first + m.chosen[i] * width;
    for (int32_t e0 = lane; e0 < experts; e0 += 32 * kTogether) {
      int32_t n[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) n[k] = i > 0 && e0 + 32 * k < experts ? first[e0 + 32 * k] : 0;
#pragma unroll
      for (int k = 0; k < kTogether; ++k)
        if (e0 + 32 * k < experts) first[e0 + 32 * k] = m.counts[e0 + 32 * k] + n[k];
    }
  }
}

__global__ void __launch_bounds__(32)
    arrive_kernel(const __grid_constant__ DeviceControl c, int64_t linger_ns, int32_t* item) {
  extern __shared__ int64_t memory[];
  const Choosing m(c, memory);
  const int lane = threadIdx.x;
  const int64_t start = global_ns(), arrivals = c.state->arrivals;
  const int32_t generation = c.state->generation;
  const bool failed = has_failed(c);
  const uint32_t slots = static_cast<uint32_t>(c.slots()), cursor = static_cast<uint32_t>(c.state->cursor);
  const uint32_t per_region = static_cast<uint32_t>(c.layout.slots_per_region);
  for (int64_t e = lane; e < c.geometry.local_experts; e += 32) m.total[e] = 0;
  // Bit i: this lane's slot of the i-th 32 is not taken. Only arrive takes, so it need not ask again.
  uint64_t free = 0;
  int32_t count = 0, layer = 0;
  int64_t rows = 0;
  const uint32_t peers = static_cast<uint32_t>(c.peers);
  uint32_t next = cursor, strange_at = 0;
  int32_t strange = kEmpty;  // a flag word that this lane saw and nobody may have written
  int64_t since = 0;         // when a slot was first seen ready
  bool more = linger_ns > 0;
  for (uint32_t turn = 1; !__any_sync(kWarp, failed); ++turn) {
    int32_t seen = 0;
    for (uint32_t base = 0; base < slots; base += 32) {
      const uint32_t place = cursor + (base + lane) / per_region, region = place % peers;
      const uint32_t at = region * per_region + (place / peers + base + lane) % per_region;
      bool ready = false;
      if (base + lane < slots) {
        // taken first, then the flag: an answered slot must not be taken again (docs/protocol.md)
        const uint64_t mine = base / 32 < 64 ? 1ull << (base / 32) : 0;
        bool open = (free & mine) != 0;
        if (!open) open = load_acquire_gpu(&c.taken[at].sequence) < 0;
        if (open) {
          free |= mine;
          const int32_t state = load_relaxed(&c.region[region]), sticky = peer_state(c, region);
          const int32_t flag = load_acquire(flag_of(c.window, c.layout, at));
          ready = flag == kReady && state == kAlive && sticky == kAlive;
          if (flag != kReady && flag != kEmpty) strange = flag, strange_at = at;
        }
      }
      uint32_t left = __ballot_sync(kWarp, ready);
      seen += __popc(left);
      for (; !more && left != 0; left &= left - 1) {
        const int64_t index = __shfl_sync(kWarp, at, __ffs(static_cast<int>(left)) - 1);
        const uint32_t head = __shfl_sync(kWarp, place, __ffs(static_cast<int>(left)) - 1);
        SlotHeader h;
        __syncwarp();  // the lane that acquired the flag may be another
        if (!admit(c, index, generation, m, h)) continue;
        const int32_t its_rows = __shfl_sync(kWarp, h.routed, 0), its_layer = __shfl_sync(kWarp, h.layer, 0);
        const bool fits = count == 0 || rows + its_rows <= c.rows;
        if (count > 0 && (!fits || its_layer != layer)) continue;
        if (count == 0) next = (head + 1) % slots;
        layer = its_layer;
        rows += its_rows;
        take(c, index, h, count++, m, item);
      }
    }
    if (count > 0) break;
    if (more && seen > 0) {
      const int64_t now = global_ns();
      if (since == 0) since = now;
      more = !__any_sync(kWarp, seen >= c.peers || now - since >= linger_ns);
    }
    if (turn % 16 != 0) continue;
    watch_peers(c, turn % 256 == 0);
    if (strange != kEmpty) refuse_flag(c, strange_at, strange);
    strange = kEmpty;
    __syncwarp();
    bool over = has_failed(c) || global_ns() - start > c.poll_ns;
    if (turn % 256 == 0) over |= ask_host(&c.mapped->abort) != 0;
    if (__any_sync(kWarp, over)) break;
  }
  __syncwarp();
  int64_t* mail = c.mailbox + arrivals % kMailbox * kMailWords;
  if (lane < kMailWords)  // the host is waiting
    *reinterpret_cast<volatile int64_t*>(&mail[lane]) =
        mail_word(arrivals + 1, lane == kMailCount   ? count
                                : lane == kMailLayer ? layer
                                                     : static_cast<int32_t>(rows));
  place_rows(c, m, count);
  if (lane == 0) {
    reinterpret_cast<int4*>(item)[0] = make_int4(generation, count, layer, static_cast<int32_t>(rows));
    reinterpret_cast<int4*>(item)[1] = make_int4(0, 0, 0, 0);
    static_assert(kItemGeneration == 0 && kItemCount == 1 && kItemLayer == 2 && kItemRows == 3);
    c.state->cursor = static_cast<int32_t>(next);
    c.state->arrivals = arrivals + 1;
    if (count > 0) {
      count_up(&c.state->counters[k_items], 1);
      count_up(&c.state->counters[k_rows], rows);
    }
  }
}

}  // namespace

void launch_arrive(const DeviceControl& c, int32_t* item, cudaStream_t stream) {
  arrive_kernel<<<1, 32, arrive_bytes(c.geometry, c.slots()), stream>>>(c, c.mapped->linger_ns, item);
}

cudaError_t preload_arrive() {
  cudaFuncAttributes a;
  return cudaFuncGetAttributes(&a, arrive_kernel);
}

}  // namespace afd
