// A work item as receive and reply see it: which token of which slot is the n-th.
#pragma once

#include "device.cuh"

namespace afd {

struct ItemToken {
  int32_t region, stage, ring;
  int64_t slot, token, sequence;
};

__device__ inline int64_t item_tokens(const int32_t* item, int32_t count) {
  int64_t n = 0;
  for (int32_t i = 0; i < count; ++i) n += item[(1 + i) * kItemWords + kItemTokens];
  return n;
}

__device__ inline ItemToken item_token(const DeviceControl& c, const int32_t* item, int64_t n) {
  const int32_t* s = item + kItemWords;
  while (n >= s[kItemTokens]) {
    n -= s[kItemTokens];
    s += kItemWords;
  }
  return {s[kItemRegion],
          s[kItemStage],
          s[kItemRing],
          c.slot(s[kItemRegion], s[kItemStage], s[kItemRing]),
          n,
          join(s[kItemSequenceLow], s[kItemSequenceHigh])};
}

// The row of one choice, or -1; an index from the wire is never used before it is checked.
__device__ inline int64_t row_of(const DeviceControl& c, const int32_t* item, const ItemToken& at, int64_t k, Op op) {
  const Geometry& g = c.geometry;
  const int2 p = *reinterpret_cast<const int2*>(
      &DeviceSlot(c.window, c.layout, at.slot).position[at.token * g.topk + k]);  // expert, rank
  if (p.x == -1) return -1;
  const int64_t e = at.slot * g.local_experts + p.x;
  if (p.x < 0 || p.x >= c.local_experts() || p.y < 0 || p.y >= c.counts[e]) {
    ErrorRecord r = error_at(Kind::Protocol, op, item[kItemLayer], at.region, at.stage, at.ring, at.sequence);
    r.field = static_cast<int32_t>(Field::position);
    r.expected = -1;
    r.seen = p.x;
    close_region(c, r);
    return -1;
  }
  return static_cast<int64_t>(c.first[e]) + p.y;
}

// A token's rows by a warp: lane k holds choice k, and choice k + 32 (kMaxTopk is 64).
struct Choices {
  int64_t row[2];
  __device__ Choices(const DeviceControl& c, const int32_t* item, const ItemToken& at, Op op) {
    const int64_t k = threadIdx.x % 32;
    row[0] = k < c.geometry.topk ? row_of(c, item, at, k, op) : -1;
    row[1] = k + 32 < c.geometry.topk ? row_of(c, item, at, k + 32, op) : -1;
  }
};

}  // namespace afd
