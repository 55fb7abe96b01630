// receive: the chosen tokens in local-expert order.
//   moves    one row per (token, choice) of the item, out of the window
//   order    after arrive's acquire of the flags; the slots stay ours until reply
//   waits    never
//   fails    a position outside what the header announced: that region is closed, the others are served on
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <tuple>

#include "item.h"

namespace afd {
namespace {

std::tuple<Tensor, Tensor, Tensor> receive_cpu(const Tensor& item, Tensor port, int64_t window, int64_t rows) {
  constexpr Op op = Op::receive;
  Entry entry(window, kFfn, op);
  Control& c = entry.control();
  const Geometry& g = c.geometry;
  read_port(c, op, port);
  Item it = read_item(c, op, item);
  if (rows < it.rows) raise(Kind::Argument, op, "rows is ", rows, ", but the item has ", it.rows, " rows");

  const int32_t experts = c.local_experts();
  Tensor out = torch::stable::new_empty(item, {rows, g.hidden}, payload_type(g));
  Tensor scales = torch::stable::new_empty(item, {0}, ScalarType::Float);
  Tensor offsets = torch::stable::new_empty(item, {experts}, ScalarType::Int);
  std::memcpy(offsets.mutable_data_ptr(), it.ends.data(), experts * sizeof(int32_t));

  const int64_t row_bytes = g.hidden * itemsize(g.dtype);
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  for (size_t i = 0; i < it.slots.size(); ++i) {
    ItemSlot& s = it.slots[i];
    const Taken& taken = c.taken[s.slot];
    if (!s.live || taken.routed == 0) continue;
    const Slot slot(c.window, c.layout, s.slot);
    const int64_t* first = it.first.data() + i * experts;
    for (int64_t n = 0; s.live && n < taken.num_tokens * g.topk; ++n) {
      const Position p = slot.position[n];
      if (!position_ok(c, s, p)) {
        bad_position(c, op, s, it.layer, p);
      } else if (p.expert >= 0) {
        std::memcpy(to + (first[p.expert] + p.rank) * row_bytes, slot.payload + n / g.topk * row_bytes, row_bytes);
      }
    }
  }
  return {out, scales, offsets};
}

}  // namespace
}  // namespace afd

STABLE_TORCH_LIBRARY_IMPL(afd, CPU, m) { m.impl("receive", TORCH_BOX(&afd::receive_cpu)); }
