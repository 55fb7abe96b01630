// A work item as receive and reply see it: which token of which slot is the n-th.
#pragma once

#include "device.cuh"

namespace afd {

struct ItemToken {
  int32_t region, stage, ring, routed;
  int64_t slot, token, sequence;
};

// The head and the first slot are read together: most items have no other.
struct Item {
  const int32_t* words;
  int32_t generation, count, layer, rows;
  int4 slot[2];
  __device__ explicit Item(const int32_t* words_) : words(words_) {
    const auto* v = reinterpret_cast<const int4*>(words);
    const int4 head = v[0];
    slot[0] = v[2];
    slot[1] = v[3];
    generation = head.x, count = head.y, layer = head.z, rows = head.w;
  }
  __device__ int64_t tokens() const {
    int64_t n = count > 0 ? slot[1].y : 0;
    for (int32_t i = 1; i < count; ++i) n += words[(1 + i) * kItemWords + kItemTokens];
    return n;
  }
  // The n-th token of the item.
  __device__ ItemToken token(const DeviceControl& c, int64_t n) const {
    int4 a = slot[0], b = slot[1];
    for (const auto* v = reinterpret_cast<const int4*>(words) + 4; n >= b.y; v += 2) {
      n -= b.y;
      a = v[0];
      b = v[1];
    }
    return of(c, a, b, n);
  }
  // The i-th slot, as its first token.
  __device__ ItemToken at(const DeviceControl& c, int32_t i) const {
    const auto* v = reinterpret_cast<const int4*>(words) + 2 + 2 * i;
    return i == 0 ? of(c, slot[0], slot[1], 0) : of(c, v[0], v[1], 0);
  }
  __device__ int32_t tokens_of(int32_t i) const {
    return i == 0 ? slot[1].y : words[(1 + i) * kItemWords + kItemTokens];
  }

 private:
  __device__ static ItemToken of(const DeviceControl& c, const int4& a, const int4& b, int64_t n) {
    return {a.x, a.y, a.z, b.z, c.slot(a.x, a.y, a.z), n, join(a.w, b.x)};
  }
};

// A token's rows by a warp: lane k holds choice k, and choice k + 32 (kMaxTopk is 64); -1 if it has none here, or if
// the slot is not this item's any more. An index from the wire is never used before it is checked.
struct Choices {
  int64_t row[2];
  __device__ Choices(const DeviceControl& c, const Item& item, const ItemToken& at, Op op) {
    const int32_t k = static_cast<int32_t>(threadIdx.x % 32), topk = static_cast<int32_t>(c.geometry.topk);
    const int32_t state = load_relaxed(&c.region[at.region]);
    const int64_t taken = c.taken[at.slot].sequence;
    const auto* position =
        reinterpret_cast<const int2*>(DeviceSlot(c.window, c.layout, at.slot).position) + at.token * topk;
    const int2 none = make_int2(-1, -1);
    const int2 a = k < topk && at.routed != 0 ? position[k] : none;
    const int2 b = k + 32 < topk && at.routed != 0 ? position[k + 32] : none;
    // One answer for the whole warp: what follows votes and shuffles.
    const bool current = __all_sync(kWarp, state == kAlive && taken == at.sequence);
    row[0] = current ? row_of(c, item, at, a, op) : -1;
    row[1] = current ? row_of(c, item, at, b, op) : -1;
  }

 private:
  __device__ static int64_t row_of(const DeviceControl& c, const Item& item, const ItemToken& at, int2 p, Op op) {
    if (p.x == -1) return -1;
    const bool local = p.x >= 0 && p.x < c.local_experts();
    const int64_t e = at.slot * c.geometry.local_experts + (local ? p.x : 0);
    const int32_t count = c.counts[e], first = c.first[e];
    if (!local || p.y < 0 || p.y >= count) {
      ErrorRecord r = error_at(Kind::Protocol, op, item.layer, at.region, at.stage, at.ring, at.sequence);
      r.field = static_cast<int32_t>(Field::position);
      r.expected = -1;
      r.seen = p.x;
      close_region(c, r);
      return -1;
    }
    return static_cast<int64_t>(first) + p.y;
  }
};

}  // namespace afd
