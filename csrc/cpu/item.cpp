// The work item that arrive hands to receive and reply, read back and checked against what was taken.
#include "kernels.h"

namespace afd {

Item read_item(const Control& c, Op op, const int32_t* w) {
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

void bad_position(Control& c, Op op, ItemSlot& s, int32_t layer, const Position& p) {
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
