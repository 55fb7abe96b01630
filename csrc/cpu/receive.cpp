// receive: the chosen tokens in local-expert order.
//   moves    one row per (token, choice) of the item, out of the window
//   order    after arrive's acquire of the flags; the slots stay ours until reply
//   waits    never
//   fails    a position outside what the header announced: that region is closed, the others are served on
#include <algorithm>
#include <cstring>

#include "kernels.h"

namespace afd {

void receive(Control& c, Item& item, char* rows) {
  const Geometry& g = c.geometry;
  const int64_t row_bytes = g.hidden * itemsize(g.dtype);
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
        std::memcpy(rows + static_cast<int64_t>(first[p.expert] + p.rank) * row_bytes,
                    slot.payload + n / g.topk * row_bytes, row_bytes);
      }
    }
    if (s.live && placed != taken.routed) bad_position(c, Op::receive, s, item.layer, {-1, -1});
  }
}

}  // namespace afd
