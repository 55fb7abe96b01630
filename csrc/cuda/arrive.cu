// arrive: wait for any slot, choose what to compute together, say so to the device (item) and to the host (mailbox).
//   moves    one flag word per slot; headers of ready slots, and the counts of those that join
//   launch   one CTA of 256 threads: its first warp polls and looks at headers, then a thread per expert
//   order    flag (acquire, by the first warp; __syncthreads hands it on), then header; header and counts are copied
//            out of the window here, once. The mailbox needs no fence: every word of it says which item it belongs to.
//            It is written before the item's places are: what the host launches for it runs behind receive, which
//            waits for the end of this kernel or, a server's, for the tag that is released last
//   waits    until a slot is ready (and `linger` longer for more) or the poll interval is over; an empty item is not an
//            error, and is also what is said when receive is on its way and the only ready slot is refused
//   fails    a slot that breaks the protocol or a peer that ended: its region is closed, the others are served on
// The choice is csrc/cpu/arrive.cpp's: see there for why it is fair.
#include "device.cuh"
#include "kernels.h"

namespace afd {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// Peers that ended, each acted on once, by the lane of the first warp that owns it.
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

// A slot.
struct Place {
  int32_t region, stage, ring;
  __device__ int32_t index(const DeviceControl& c) const {
    return (region * static_cast<int32_t>(c.geometry.stages) + stage) * static_cast<int32_t>(c.geometry.depth) + ring;
  }
};

// By one lane: a flag that is neither EMPTY nor READY.
__device__ void refuse_flag(const DeviceControl& c, Place at, int32_t seen) {
  if (load_relaxed(&c.region[at.region]) != kAlive) return;
  close_region(c, bad_flag(where(Op::arrive, -1, at.stage, at.ring, -1), at.region, seen));
}

// What the choice needs beside the window. All but `experts` is in shared memory: arrive_bytes. Slots are kept taken
// apart, since a division takes as long as a load, and in 16 bits, since there are no more than fit into that memory.
struct Choosing {
  int32_t experts;                  // of this rank, read before the wait
  int32_t* total;                   // [local_experts]: rows of the item so far
  int32_t* counts;                  // [local_experts]: of the slot that is looked at
  uint32_t* ready;                  // [slots / 32, rounded up]: bit i % 32 of word i / 32: the i-th in order is ready
  uint16_t* chosen;                 // [slots]: the item's
  uint16_t *region, *stage, *ring;  // [slots] each: which slot is the i-th to be looked at
  __device__ Choosing(const DeviceControl& c, int32_t* memory)
      : experts(c.local_experts()),
        total(memory),
        counts(total + c.geometry.local_experts),
        ready(reinterpret_cast<uint32_t*>(counts + c.geometry.local_experts)),
        chosen(reinterpret_cast<uint16_t*>(ready + (c.slots() + 31) / 32)),
        region(chosen + c.slots()),
        stage(region + c.slots()),
        ring(stage + c.slots()) {}
  __device__ Place place(uint32_t i) const { return {region[i], stage[i], ring[i]}; }
};

// What the warps tell each other.
struct Exchange {
  SlotHeader header;
  int32_t ready;  // slots that the last wait found
  uint32_t candidate;
  int64_t sums[kWarps];
  uint32_t most[kWarps];
};

// Regions that may still send something; of a warp.
__device__ int32_t regions_alive(const DeviceControl& c) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  int32_t alive = 0;
  for (int32_t base = 0; base < c.peers; base += 32)
    alive += __popc(__ballot_sync(kWarp, base + lane < c.peers && load_relaxed(&c.region[base + lane]) == kAlive));
  return alive;
}

// The first warp's wait. Its lanes own every 32nd slot in order.
struct Poll {
  int64_t start, since = 0;  // since: when a slot was first seen ready
  uint64_t free = 0;         // bit i: this lane's i-th slot is not taken. Only arrive takes: it need not ask again
  uint32_t turn = 0;
  int32_t strange = kEmpty;  // a flag word that this lane saw and nobody may have written, and where
  Place strange_at{};

  // Until a slot is ready; m.ready says which, x.ready how many. With `once` also if none is. False: there is nothing
  // to wait for any more.
  __device__ bool wait(const DeviceControl& c, const Choosing& m, Exchange& x, int64_t linger_ns, bool once) {
    const uint32_t lane = threadIdx.x, slots = static_cast<uint32_t>(c.slots());
    while (true) {
      int32_t seen = 0;
      for (uint32_t base = 0; base < slots; base += 32) {
        bool ready = false;
        if (base + lane < slots) {
          const Place place = m.place(base + lane);
          const int32_t at = place.index(c);
          // taken first, then the flag: an answered slot must not be taken again (docs/protocol.md)
          const uint64_t mine = base / 32 < 64 ? 1ull << (base / 32) : 0;
          bool open = (free & mine) != 0;
          if (!open) open = load_acquire_gpu(&c.taken[at].sequence) < 0;
          if (open) {
            free |= mine;
            const int32_t state = load_relaxed(&c.region[place.region]), sticky = peer_state(c, place.region);
            const int32_t flag = load_acquire(flag_of(c.window, c.layout, at));
            ready = flag == kReady && state == kAlive && sticky == kAlive;
            if (flag != kReady && flag != kEmpty) strange = flag, strange_at = place;
          }
        }
        const uint32_t found = __ballot_sync(kWarp, ready);
        if (lane == 0) m.ready[base / 32] = found;
        seen += __popc(found);
      }
      if (lane == 0) x.ready = seen;
      if (seen > 0) {
        if (linger_ns == 0) return true;
        const int64_t now = global_ns();
        if (since == 0) since = now;
        if (__any_sync(kWarp, seen >= regions_alive(c) || now - since >= linger_ns)) return true;
      } else if (once) {
        return true;
      }
      if (++turn % 16 != 0) continue;
      watch_peers(c, turn % 256 == 0);
      if (strange != kEmpty) refuse_flag(c, strange_at, strange);
      strange = kEmpty;
      __syncwarp();
      bool stop = has_failed(c);
      if (turn % 256 == 0) stop |= ask_host(&c.mapped->abort) != 0;
      if (__any_sync(kWarp, stop)) return false;
      // Whom it lingers for, it takes: not for another interval.
      if (__any_sync(kWarp, global_ns() - start > c.poll_ns)) return seen > 0;
    }
  }
};

// What the item holds so far.
struct Chosen {
  int32_t count = 0, layer = 0;
  int64_t rows = 0;
  __device__ bool joins(const DeviceControl& c, int32_t layer_, int32_t routed) const {
    return count == 0 || (layer_ == layer && rows + routed <= c.rows);
  }
};

// Finds the ready slots that are worth a check. A check takes all warps, one slot at a time, and longer than a load:
// who by its header has to wait is passed over, 32 at a time. Only the first warp looks, because a peer may be
// overwriting headers, and its lanes keep what they saw of one word of m.ready.
struct Candidates {
  uint32_t word = ~0u;
  int32_t layer = 0, routed = 0;

  // The first in order from `from` on, `end` if there is none; the same for all threads.
  __device__ uint32_t next(const DeviceControl& c, const Choosing& m, Exchange& x, const Chosen& item, uint32_t from,
                           uint32_t end) {
    uint32_t at = from / 32, left = from < end ? m.ready[at] & ~0u << from % 32 : 0;
    const auto skip = [&] {
      while (left == 0 && ++at * 32 < end) left = m.ready[at];
    };
    skip();
    if (left == 0) return end;
    if (item.count == 0) return at * 32 + __ffs(static_cast<int>(left)) - 1;
    if (threadIdx.x < 32) {
      uint32_t found = 0;
      for (; left != 0; left = 0, skip()) {
        const bool ready = (left >> threadIdx.x & 1) != 0;
        if (ready && at != word) {
          const SlotHeader* h = Slot(c.window, c.layout, m.place(at * 32 + threadIdx.x).index(c)).header;
          layer = h->layer, routed = h->routed;
        }
        word = at;
        found = __ballot_sync(kWarp, ready && item.joins(c, layer, routed));
        if (found != 0) break;
      }
      if (threadIdx.x == 0) x.candidate = found != 0 ? at * 32 + __ffs(static_cast<int>(found)) - 1 : end;
    }
    __syncthreads();
    return x.candidate;
  }
};

// What a thread, and the CTA, found in the counts of a slot.
struct Counts {
  uint32_t most_here = 0, most_of_all = 0;  // a negative count is a large one
  int32_t strange = 0;                      // of an expert that this rank does not have
  int64_t sum = 0;
};

// Closes the region of a slot that breaks the protocol; by all threads, and the first to record it says how it does.
__device__ __noinline__ void refuse(const DeviceControl& c, Place at, int32_t generation, const SlotHeader& h,
                                    Counts found) {
  ErrorRecord r = error_at(Kind::Protocol, Op::arrive, h.layer, at.region, at.stage, at.ring, h.sequence);
  const auto fails = [&r](bool bad, Field field, int64_t expected, int64_t seen) {
    if (!bad) return false;
    name_word(r, field, expected, seen);
    return true;
  };
  const int64_t most = h.num_tokens * c.geometry.topk;
  bool speaks = threadIdx.x == 0;
  if (!header_fails(c.geometry, h, generation, at.ring, fails)) {
    if (found.most_of_all > most)  // those speak who have such a count
      speaks = fails(found.strange != 0, Field::counts, 0, found.strange) ||
               fails(found.most_here > most, Field::counts, most, static_cast<int32_t>(found.most_here));
    else
      fails(true, Field::counts, h.routed, found.sum);
  }
  if (speaks) close_region(c, r);
}

// Checks a ready slot's header and counts; false (region closed) if the protocol forbids them, or it was closed before.
// One answer for all threads, and one header, left in x: a peer may be overwriting it. A rehearsal closes nothing. Lets
// receive onto the device if it is told to: not while more slots are to be checked, it would be in the way.
__device__ bool admit(const DeviceControl& c, Place at, int32_t generation, const Choosing& m, Exchange& x,
                      bool rehearses, bool begins_next, int32_t& layer, int32_t& routed) {
  const Geometry& g = c.geometry;
  const Slot slot(c.window, c.layout, at.index(c));
  constexpr int kHeaderWords = sizeof(SlotHeader) / 4;
  constexpr uint32_t kStrange = 0xffffffffu;  // more than any count may be
  const int32_t thread = static_cast<int32_t>(threadIdx.x), width = static_cast<int32_t>(g.local_experts);
  const int32_t word = thread < kHeaderWords ? reinterpret_cast<const int32_t*>(slot.header)[thread] : 0;
  int32_t n = thread < width ? slot.counts[thread] : 0;
  const int32_t state = load_relaxed(&c.region[at.region]);
  // receive takes a microsecond to get onto the device; by then the check and the mail are done.
  if (begins_next) begin_next();
  __syncthreads();  // x has been read
  if (thread < kHeaderWords) reinterpret_cast<int32_t*>(&x.header)[thread] = word;
  int64_t mine = 0;
  Counts found;
#pragma unroll 1
  for (int32_t e = thread; e < width; e += kThreads) {
    if (e != thread) n = slot.counts[e];
    m.counts[e] = n;
    mine += n;
    if (e < m.experts)
      found.most_here = max(found.most_here, static_cast<uint32_t>(n));
    else if (n != 0)
      found.strange = n;
  }
  // Over the warp in two parts that cannot overflow: a count is less than 2^31, and a thread has at most 2^5 of them.
  const int64_t sum = (static_cast<int64_t>(__reduce_add_sync(kWarp, static_cast<uint32_t>(mine >> 20))) << 20) +
                      __reduce_add_sync(kWarp, static_cast<uint32_t>(mine & 0xfffff));
  const uint32_t most_of_warp = __reduce_max_sync(kWarp, found.strange != 0 ? kStrange : found.most_here);
  if (thread % 32 == 0) x.sums[thread / 32] = sum, x.most[thread / 32] = most_of_warp;
  const bool alive = __syncthreads_and(state == kAlive) != 0;
  const SlotHeader h = x.header;
  layer = h.layer, routed = h.routed;
  if (!alive) return false;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) found.sum += x.sums[w], found.most_of_all = max(found.most_of_all, x.most[w]);
  const int64_t most = h.num_tokens * g.topk;
  const auto bad = [](bool is, Field, int64_t, int64_t) { return is; };
  if (!header_fails(g, h, generation, at.ring, bad) && found.most_of_all <= most && found.sum == h.routed &&
      found.sum <= most) [[likely]]
    return true;
  if (!rehearses) refuse(c, at, generation, x.header, found);
  return false;
}

// Takes an admitted slot into the item as its n-th. Rows stand by expert, and within an expert in item order: `first`
// is relative to the expert's rows until place_rows.
__device__ void take(const DeviceControl& c, Place at, const SlotHeader& h, int32_t n, const Choosing& m,
                     int32_t* item) {
  const int32_t index = at.index(c);
  const int64_t width = c.geometry.local_experts;
#pragma unroll 1
  for (int32_t e = threadIdx.x; e < m.experts; e += kThreads) {
    const int32_t before = n > 0 ? m.total[e] : 0, count = m.counts[e];
    c.counts[index * width + e] = count;
    if (n > 0) c.first[index * width + e] = before;
    m.total[e] = before + count;
  }
  if (threadIdx.x != 0) return;
  m.chosen[n] = static_cast<uint16_t>(index);
  c.taken[index] = {h.sequence, global_ns(), h.layer, h.num_tokens, h.routed, 0};
  count_up(&c.slots_taken[at.region], 1);
  count_up(&c.rows_taken[at.region], h.routed);
  auto* s = reinterpret_cast<int4*>(item + (1 + n) * kItemWords);
  s[0] = make_int4(at.region, at.stage, at.ring, low(h.sequence));
  s[1] = make_int4(high(h.sequence), h.num_tokens, h.routed, 0);
  static_assert(kItemRegion == 0 && kItemStage == 1 && kItemRing == 2 && kItemSequenceLow == 3);
  static_assert(kItemSequenceHigh == 4 && kItemTokens == 5 && kItemRouted == 6 && kItemWords == 8);
}

// Makes `first` of the item's slots absolute.
__device__ void place_rows(const DeviceControl& c, const Choosing& m, Exchange& x, int32_t count) {
  const int64_t width = c.geometry.local_experts;
  const int32_t experts = count > 0 ? m.experts : 0, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t before = 0;  // rows of the experts of earlier rounds
  for (int32_t base = 0; base < experts; base += kThreads) {
    const int32_t e = base + static_cast<int32_t>(threadIdx.x), mine = e < experts ? m.total[e] : 0;
    int32_t inclusive = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int32_t other = __shfl_up_sync(kWarp, inclusive, d);
      if (lane >= d) inclusive += other;
    }
    __syncthreads();  // the sums of before have been read; m.chosen is there
    if (lane == 31) x.sums[warp] = inclusive;
    __syncthreads();
    int64_t place = before + inclusive - mine;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) place += x.sums[w];
      before += x.sums[w];
    }
    if (e >= experts) continue;
#pragma unroll 1
    for (int32_t i = 0; i < count; ++i) {
      int32_t& first = c.first[m.chosen[i] * width + e];
      first = static_cast<int32_t>(place) + (i > 0 ? first : 0);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    arrive_kernel(const __grid_constant__ DeviceControl c, int64_t linger_ns, int32_t* item, int32_t tag) {
  extern __shared__ int32_t memory[];
  __shared__ Exchange x;
  const Choosing m(c, memory);
  const int64_t arrivals = c.state->arrivals;
  const int32_t generation = c.state->generation;
  const uint32_t slots = static_cast<uint32_t>(c.slots()), cursor = static_cast<uint32_t>(c.state->cursor);
  const uint32_t per_region = static_cast<uint32_t>(c.layout.slots_per_region), peers = static_cast<uint32_t>(c.peers);
  for (uint32_t i = threadIdx.x; i < slots; i += kThreads) {
    const uint32_t place = cursor + i / per_region;
    const uint32_t within = (place / peers + i) % per_region, depth = static_cast<uint32_t>(c.geometry.depth);
    m.region[i] = static_cast<uint16_t>(place % peers);
    m.stage[i] = static_cast<uint16_t>(within / depth);
    m.ring[i] = static_cast<uint16_t>(within % depth);
  }
  const Place nobodys{c.peers, 0, 0};
  Poll poll{global_ns()};
  Chosen chosen;
  uint32_t head = 0;  // of the item: its place in order
  bool waits = !__syncthreads_or(has_failed(c));
  // The host is waiting, and so is a server's receive: both hear of an item before its last slot is taken.
  const auto mail = [&] {
    volatile int64_t* words = c.mailbox + arrivals % kMailbox * kMailWords;
    if (threadIdx.x < kMailWords)
      words[threadIdx.x] = mail_word(arrivals + 1, threadIdx.x == kMailCount   ? chosen.count
                                                   : threadIdx.x == kMailLayer ? chosen.layer
                                                                               : static_cast<int32_t>(chosen.rows));
    begin_next();  // nothing is waited for from here on
  };
  // If the first look finds nothing to take, the way from a flag to the item is rehearsed: with the first slot as it
  // is, taken as slot number `slots`, which is nobody's. What a kernel meets for the first time, instructions above
  // all, costs microseconds, and later a peer waits for it.
  enum { kLook, kRehearse, kWait } phase = kLook;
  bool sole = false;  // the only slot, and receive is on its way: nothing is waited for from here on
  while (true) {
    const bool rehearses = phase == kRehearse;
    if (rehearses && threadIdx.x == 0) m.ready[0] = 1;
    if (waits && !rehearses && threadIdx.x < 32) waits = poll.wait(c, m, x, linger_ns, phase == kLook);
    waits = __syncthreads_and(waits);
    const uint32_t end = !waits ? 0 : rehearses ? 1 : slots;
    Candidates candidates;
    for (uint32_t i = candidates.next(c, m, x, chosen, 0, end); i < end;) {
      const Place at = m.place(i);
      int32_t layer, routed;
      sole = tag != 0 && !rehearses && x.ready == 1;
      const bool admitted = admit(c, at, generation, m, x, rehearses, sole, layer, routed) || rehearses;
      const bool joins = admitted && chosen.joins(c, layer, routed);
      if (joins) {
        if (chosen.count == 0) head = i;
        chosen = {chosen.count + 1, layer, chosen.rows + routed};
      }
      i = candidates.next(c, m, x, chosen, i + 1, end);
      if (i == end && chosen.count > 0 && !rehearses) mail();
      if (joins) take(c, rehearses ? nobodys : at, x.header, chosen.count - 1, m, item);
    }
    const bool over = !rehearses && (chosen.count > 0 || sole || !waits);
    if (over && chosen.count == 0) {
      __syncthreads();         // whoever refused a slot has said so,
      __threadfence_system();  // and the host hears of that before it hears of nothing
      mail();
    }
    place_rows(c, m, x, chosen.count);
    if (over) break;
    chosen = {};
    phase = phase == kLook ? kRehearse : kWait;
    __syncthreads();  // m.ready and m.chosen have been read
  }
  __syncthreads();  // all of the item is written, but for its head
  if (threadIdx.x == 0) {
    reinterpret_cast<int4*>(item)[0] =
        make_int4(generation, chosen.count, chosen.layer, static_cast<int32_t>(chosen.rows));
    reinterpret_cast<int4*>(item)[1] = make_int4(0, 0, 0, 0);
    if (tag != 0) store_release_gpu(&c.state->ready, tag);
    static_assert(kItemGeneration == 0 && kItemCount == 1 && kItemLayer == 2 && kItemRows == 3);
    c.state->arrivals = arrivals + 1;
    if (chosen.count > 0) {
      c.state->cursor = static_cast<int32_t>((cursor + head / per_region + 1) % slots);
      count_up(&c.state->counters[k_items], 1);
      count_up(&c.state->counters[k_rows], chosen.rows);
    }
  }
}

}  // namespace

cudaError_t launch_arrive(const DeviceControl& c, int32_t* item, int32_t tag, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(arrive_bytes(c.geometry, c.slots()));
  config.stream = stream;
  return cudaLaunchKernelEx(&config, arrive_kernel, c, c.mapped->linger_ns, item, tag);
}

cudaError_t preload_arrive() {
  cudaFuncAttributes a;
  return cudaFuncGetAttributes(&a, arrive_kernel);
}

}  // namespace afd
