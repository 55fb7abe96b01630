// A work item as receive and reply see it: which token of which slot is the n-th.
#pragma once

#include "device.cuh"

namespace afd {

struct ItemToken {
  int32_t region, stage, ring;
  int64_t slot, token, sequence;
};

__device__ inline int64_t item_tokens(const int32_t* item) {
  int64_t n = 0;
  for (int32_t i = 0; i < item[kItemCount]; ++i) n += item[(1 + i) * kItemWords + kItemTokens];
  return n;
}

__device__ inline ItemToken item_token(const DeviceControl* c, const int32_t* item, int64_t n) {
  const int32_t* s = item + kItemWords;
  while (n >= s[kItemTokens]) {
    n -= s[kItemTokens];
    s += kItemWords;
  }
  return {s[kItemRegion],
          s[kItemStage],
          s[kItemRing],
          c->slot(s[kItemRegion], s[kItemStage], s[kItemRing]),
          n,
          join(s[kItemSequenceLow], s[kItemSequenceHigh])};
}

// The row of one choice, or -1; an index from the wire is never used before it is checked.
__device__ inline int64_t row_of(DeviceControl* c, const int32_t* item, const ItemToken& at, int64_t k, Op op) {
  const Geometry& g = c->geometry;
  const Position p = DeviceSlot(c->window, c->layout, at.slot).position[at.token * g.topk + k];
  if (p.expert == -1) return -1;
  const int64_t e = at.slot * g.local_experts + p.expert;
  if (p.expert < 0 || p.expert >= c->local_experts() || p.rank < 0 || p.rank >= c->counts[e]) {
    ErrorRecord r = error_at(Kind::Protocol, op, item[kItemLayer], at.region, at.stage, at.ring, at.sequence);
    r.field = static_cast<int32_t>(Field::position);
    r.expected = -1;
    r.seen = p.expert;
    close_region(c, r);
    return -1;
  }
  return static_cast<int64_t>(c->first[e]) + p.rank;
}

// Work units: segments of a token's row, so that a short item occupies the whole grid.
struct Units {
  int64_t segments, span, count;
  __device__ Units(int64_t tokens, int64_t vectors) {
    const int64_t most = (vectors + blockDim.x - 1) / blockDim.x, spare = tokens > 0 ? gridDim.x / tokens : 1;
    segments = spare < 1 ? 1 : (spare < most ? spare : most);
    span = (vectors + segments - 1) / segments;
    count = tokens * segments;
  }
};

}  // namespace afd
