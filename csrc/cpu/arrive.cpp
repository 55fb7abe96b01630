// arrive: wait for any slot, choose what to compute together, say so.
//   moves    one flag word per slot; headers of ready slots
//   order    flag (acquire), then header; the header is checked here once and its counts are copied out of the window
//   waits    until a slot is ready (and `linger` longer for more) or the poll interval is over; an empty item is not an
//            error
//   fails    a slot that breaks the protocol or a peer that ended: its region is closed, the others are served on
//
// Fairness: regions take turns, and within a region its slots. The first ready slot from the cursor on heads the item
// and gives it its layer; others of that layer join while their rows fit, wherever they are. Who has to wait is not
// checked before its turn, so that an item costs what it holds, however much is ready. The next scan begins at the
// region behind the head's. The cursor counts regions on through the rounds, and in round n a region's scan begins
// at its slot n. So a region waits for at most one item per other region, and a slot for one per other slot.
#include <algorithm>

#include "kernels.h"
#include "wait.h"

namespace afd {
namespace {

// Acts on peers that ended; their slots are never looked at again.
void watch_peers(Control& c) {
  for (int32_t p = 0; p < c.peers; ++p) {
    if (c.region[p] != kAlive) continue;
    const int32_t sticky = atomic(word(c.window, c.layout.sticky, p)).load(std::memory_order_acquire);
    if (sticky == kLeft) {
      atomic(c.region[p]).store(kLeft);
    } else if (sticky != kAlive) {
      close_region(c, ended(where(Op::arrive, -1, -1, -1, -1), p, sticky));
    }
  }
}

// Checks a ready slot's header and counts and copies them: from here on they are never read from the wire again. False
// (region closed) if the protocol does not allow them.
bool admit(Control& c, int64_t index, int32_t region, int32_t stage, int32_t ring, SlotHeader& h) {
  const Geometry& g = c.geometry;
  const Slot slot(c.window, c.layout, index);
  h = *slot.header;
  ErrorRecord r = where(Op::arrive, h.layer, stage, ring, h.sequence);
  r.kind = static_cast<int32_t>(Kind::Protocol);
  r.peer = region;
  const auto fails = [&](bool bad, Field field, int64_t expected, int64_t seen) {
    if (!bad) return false;
    name_word(r, field, expected, seen);
    close_region(c, r);
    return true;
  };
  if (header_fails(g, h, c.generation, ring, fails)) return false;
  int32_t* counts = c.counts + index * g.local_experts;
  const int64_t most = static_cast<int64_t>(h.num_tokens) * g.topk;
  int64_t sum = 0;
  for (int64_t e = 0; e < g.local_experts; ++e) {
    counts[e] = slot.counts[e];
    const int64_t limit = e < c.local_experts() ? most : 0;
    if (fails(counts[e] < 0 || counts[e] > limit, Field::counts, limit, counts[e])) return false;
    sum += counts[e];
  }
  if (fails(sum != h.routed || sum > most, Field::counts, h.routed, sum)) return false;
  c.taken[index] = {-1, 0, h.layer, h.num_tokens, h.routed, 0};
  return true;
}

// Fills the item with what is ready; returns the number of slots taken.
int32_t choose(Control& c, int32_t* item) {
  const int64_t slots = c.slots(), each = c.layout.slots_per_region;
  const int64_t begin = c.cursor;
  int32_t count = 0;
  int64_t rows = 0;
  const auto joins = [&](int32_t layer, int32_t routed) {
    return count == 0 || (layer == item[kItemLayer] && rows + routed <= c.rows);
  };
  for (int64_t i = 0; i < slots; ++i) {
    const int64_t place = begin + i / each;
    const auto region = static_cast<int32_t>(place % c.peers);
    const int64_t index = region * each + (place / c.peers + i) % each;
    if (c.region[region] != kAlive || c.taken[index].sequence >= 0) continue;
    const int32_t seen = flag(c.window, c.layout, index).load(std::memory_order_acquire);
    if (seen == kEmpty) continue;
    const auto stage = static_cast<int32_t>(index / c.geometry.depth % c.geometry.stages);
    const auto ring = static_cast<int32_t>(index % c.geometry.depth);
    if (seen != kReady) {
      close_region(c, bad_flag(where(Op::arrive, -1, stage, ring, -1), region, seen));
      continue;
    }
    SlotHeader h = *Slot(c.window, c.layout, index).header;
    if (!joins(h.layer, h.routed) || !admit(c, index, region, stage, ring, h)) continue;
    Taken& taken = c.taken[index];
    if (!joins(taken.layer, taken.routed)) continue;  // a peer that writes meanwhile
    if (count == 0) c.cursor = static_cast<int32_t>((place + 1) % slots);
    taken.sequence = h.sequence;
    taken.at = now_ns();
    afd::count(c.slots_taken[region], 1);
    afd::count(c.rows_taken[region], taken.routed);
    rows += taken.routed;
    item[kItemLayer] = taken.layer;
    int32_t* s = item + (1 + count++) * kItemWords;
    s[kItemRegion] = region;
    s[kItemStage] = stage;
    s[kItemRing] = ring;
    s[kItemSequenceLow] = low(taken.sequence);
    s[kItemSequenceHigh] = high(taken.sequence);
    s[kItemTokens] = taken.num_tokens;
    s[kItemRouted] = taken.routed;
  }
  // Rows stand by expert, and within an expert in item order: slots that share an item are rebased into one order.
  int32_t row = 0;
  for (int32_t e = 0; e < c.local_experts(); ++e)
    for (int32_t i = 0; i < count; ++i) {
      const int32_t* s = item + (1 + i) * kItemWords;
      const int64_t at = c.slot(s[kItemRegion], s[kItemStage], s[kItemRing]) * c.geometry.local_experts + e;
      c.first[at] = row;
      row += c.counts[at];
    }
  item[kItemGeneration] = c.generation;
  item[kItemCount] = count;
  item[kItemRows] = static_cast<int32_t>(rows);
  return count;
}

// Slots that choose could look at now.
int32_t ready(const Control& c) {
  int32_t n = 0;
  for (int64_t i = 0; i < c.slots(); ++i)
    if (c.region[i / c.layout.slots_per_region] == kAlive && c.taken[i].sequence < 0)
      n += flag(c.window, c.layout, i).load(std::memory_order_acquire) != kEmpty;
  return n;
}

}  // namespace

void arrive(Control& c, int32_t* item) {
  Backoff backoff;
  const int64_t linger = atomic(c.linger_ns).load();
  int64_t since = -1, waited = 0;  // since: when a slot was first seen ready
  bool more = linger > 0;
  for (;;) {
    watch_peers(c);
    if (more) {
      const int32_t n = ready(c);
      const int64_t alive = std::count(c.region, c.region + c.peers, int32_t{kAlive});
      if (n > 0 && since < 0) since = now_ns();
      // Whom it lingered for, it takes when the interval is over: not for another one.
      more = waited < c.poll_ns && n < alive && (since < 0 || now_ns() - since < linger);
    }
    if (!more && choose(c, item) > 0) break;
    if (atomic(c.abort).load() != 0) raise(Kind::Aborted, Op::arrive, "the window is being reset or closed");
    if (atomic(c.failed).load() != 0) raise_failed(c, Op::arrive);
    if (waited >= c.poll_ns) return;
    waited = backoff.pause();
  }
  count(c.counters[k_items], 1);
  count(c.counters[k_rows], item[kItemRows]);
}

}  // namespace afd
