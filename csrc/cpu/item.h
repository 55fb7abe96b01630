// item.h: the work item that arrive hands to receive and reply, read back and checked against what was taken.
#pragma once

#include <vector>

#include "../checks.h"

namespace afd {

struct ItemSlot {
  int32_t region, stage, ring;
  int64_t slot, sequence;
  bool live;  // false: its region was closed after arrive; nobody waits for the answer
};

struct Item {
  int32_t layer;
  int64_t rows;
  std::vector<ItemSlot> slots;
  // Row of the first choice of (slot i, local expert e): regions that share an item are rebased into one order.
  std::vector<int64_t> first;  // [slots, local_experts]
  std::vector<int32_t> ends;   // [local_experts] cumulative
};

inline Item read_item(const Control& c, Op op, const Tensor& item) {
  check_dim(op, "item", item, 2);
  check_type(op, "item", item, ScalarType::Int);
  check_size(op, "item", item, 0, 1 + c.slots());
  check_size(op, "item", item, 1, kItemWords);
  if (!item.is_contiguous()) raise(Kind::Argument, op, "item is not contiguous");
  const auto* w = static_cast<const int32_t*>(item.const_data_ptr());
  const int32_t experts = c.local_experts(), width = static_cast<int32_t>(c.geometry.local_experts);
  Item out{w[kItemLayer], 0, {}, {}, std::vector<int32_t>(experts, 0)};
  if (w[kItemCount] < 0 || w[kItemCount] > c.slots())
    raise(Kind::Argument, op, "item holds ", w[kItemCount], " slots, expected 0 to ", c.slots());
  if (w[kItemCount] > 0 && w[kItemGeneration] != c.generation)
    raise(Kind::Stale, op, "item is of generation ", w[kItemGeneration], ", but the window is at ", c.generation);
  for (int32_t i = 0; i < w[kItemCount]; ++i) {
    const int32_t* s = w + (1 + i) * kItemWords;
    ItemSlot slot{
        s[kItemRegion], s[kItemStage], s[kItemRing], 0, join(s[kItemSequenceLow], s[kItemSequenceHigh]), true};
    if (slot.region < 0 || slot.region >= c.peers || slot.stage < 0 || slot.stage >= c.geometry.stages ||
        slot.ring < 0 || slot.ring >= c.geometry.depth)
      raise(Kind::Argument, op, "item names slot (", slot.region, ", ", slot.stage, ", ", slot.ring,
            "), which the window has not");
    slot.slot = c.slot(slot.region, slot.stage, slot.ring);
    slot.live = c.region[slot.region] == kAlive;
    if (slot.live && c.taken[slot.slot].sequence != slot.sequence)
      raise(Kind::Stale, op, "item with sequence ", slot.sequence, " of region ", slot.region, " was answered before");
    out.slots.push_back(slot);
  }
  std::vector<int64_t> begin(experts, 0);
  for (int32_t e = 0; e < experts; ++e) {
    begin[e] = out.rows;
    for (const ItemSlot& s : out.slots) out.rows += c.counts[s.slot * width + e];
    out.ends[e] = static_cast<int32_t>(out.rows);
  }
  for (const ItemSlot& s : out.slots)
    for (int32_t e = 0; e < experts; ++e) {
      out.first.push_back(begin[e]);
      begin[e] += c.counts[s.slot * width + e];
    }
  return out;
}

// The position of one choice, checked: an index from the wire is never used before. False: the slot broke the protocol.
inline bool position_ok(const Control& c, const ItemSlot& s, const Position& p) {
  return p.expert == -1 || (p.expert >= 0 && p.expert < c.local_experts() && p.rank >= 0 &&
                            p.rank < c.counts[s.slot * c.geometry.local_experts + p.expert]);
}

inline void bad_position(Control& c, Op op, ItemSlot& s, int32_t layer, const Position& p) {
  ErrorRecord r = where(op, layer, s.stage, s.ring, s.sequence);
  r.kind = static_cast<int32_t>(Kind::Protocol);
  r.field = static_cast<int32_t>(Field::position);
  r.peer = s.region;
  r.expected = -1;
  r.seen = p.expert;
  close_region(c, r);
  s.live = false;
}

}  // namespace afd
