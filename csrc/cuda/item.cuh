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
    const int4 head = load_here(v);
    slot[0] = load_here(v + 2);
    slot[1] = load_here(v + 3);
    generation = head.x, count = head.y, layer = head.z, rows = head.w;
  }
  __device__ int64_t tokens() const {
    int64_t n = count > 0 ? slot[1].y : 0;
#pragma unroll 1
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

// What receive and reply ask about a slot before they touch it: it is still this item's, and its region was not closed.
// Asked for by the constructor, answered by current(), so that other loads can be under way in between.
struct Claim {
  int32_t state;
  int64_t taken;
  __device__ Claim(const DeviceControl& c, const ItemToken& at)
      : state(load_relaxed(&c.region[at.region])), taken(c.taken[at.slot].sequence) {}
  __device__ bool current(const ItemToken& at) const { return state == kAlive && taken == at.sequence; }
  // One answer for a whole warp: what follows votes and shuffles.
  __device__ bool current_in_warp(const ItemToken& at) const { return __all_sync(kWarp, current(at)); }
};

// Rows of a token's choices: lane k holds choice k, and choice k + 32 (kMaxTopk is 64); -1: none here.
struct Choices {
  int32_t row[2];
};

__device__ __forceinline__ int32_t* rows_of(const DeviceControl& c, const ItemToken& at) {
  return c.row + (at.slot * c.geometry.tokens + at.token) * c.geometry.topk;
}

}  // namespace afd
