// The work item that arrive hands to receive and reply, read back and checked against what was taken.
#include "kernels.h"

namespace afd {

Item read_item(const Control& c, Op op, const int32_t* w) {
  Item out{w[kItemLayer], 0, {}};
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
    out.rows += c.taken[slot.slot].routed;
    out.slots.push_back(slot);
  }
  return out;
}

void item_offsets(const Control& c, const Item& item, int32_t* offsets) {
  // Within an expert the slots stand in item order, so the last one's rows end where the expert's do.
  const int64_t width = c.geometry.local_experts;
  for (int32_t e = 0; e < c.local_experts(); ++e) {
    const int64_t last = item.slots.empty() ? -1 : item.slots.back().slot * width + e;
    offsets[e] = last < 0 ? 0 : c.first[last] + c.counts[last];
  }
}

void bad_position(Control& c, Op op, ItemSlot& s, int32_t layer, const Position& p) {
  ErrorRecord r = where(op, layer, s.stage, s.ring, s.sequence);
  r.kind = static_cast<int32_t>(Kind::Protocol);
  r.peer = s.region;
  name_word(r, Field::position, -1, p.expert);
  close_region(c, r);
  s.live = false;
}

}  // namespace afd
