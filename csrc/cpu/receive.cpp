// receive: the chosen tokens in local-expert order.
//   moves    one row and its scales per (token, choice) of the item, out of the window
//   order    after arrive's acquire of the flags; the slots stay ours until reply
//   waits    never
//   fails    a position outside what the header announced: that region is closed, the others are served on
#include <algorithm>
#include <cstring>

#include "kernels.h"

namespace afd {

void receive(Control& c, Item& item, char* rows, float* scales) {
  const Geometry& g = c.geometry;
  const int64_t row_bytes = payload_row(g), scales_each = scales_per_row(g);
  std::vector<int32_t> next(c.local_experts());  // choices of an expert are numbered as they come: no row is left out
  for (ItemSlot& s : item.slots) {
    const Taken& taken = c.taken[s.slot];
    if (!s.live || taken.routed == 0) continue;
    const Slot slot(c.window, c.layout, s.slot);
    const int32_t* first = c.first + s.slot * g.local_experts;
    std::fill(next.begin(), next.end(), 0);
    int64_t placed = 0;
    for (int64_t n = 0; s.live && n < taken.num_tokens * g.topk; ++n) {
      const Position p = slot.position[n];
      if (!position_ok(c, s, p) || (p.expert >= 0 && p.rank != next[p.expert]++)) {
        bad_position(c, Op::receive, s, item.layer, p);
      } else if (p.expert >= 0) {
        ++placed;
        const int64_t row = first[p.expert] + p.rank, token = n / g.topk;
        std::memcpy(rows + row * row_bytes, slot.payload + token * row_bytes, row_bytes);
        if (scales_each > 0)
          std::memcpy(scales + row * scales_each, slot.scale + token * scales_each, scales_each * sizeof(float));
      }
    }
    if (s.live && placed != taken.routed) bad_position(c, Op::receive, s, item.layer, {-1, -1});
  }
}

}  // namespace afd
