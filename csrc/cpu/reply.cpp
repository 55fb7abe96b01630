// reply: each token's weighted sum over this rank's own experts, back to the A rank that sent it.
//   moves    one row per (token, choice) in, one row per token that has any out, into the A rank's slot
//   order    last read of the slot, its dispatch flag to EMPTY, "taken" cleared, then (release) the reply flag: a reset
//            after the publish could erase the A rank's next dispatch
//   waits    never
//   fails    an item older than the deadline or a bad position: that region is closed, the others are answered
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "convert.h"
#include "item.h"

namespace afd {
namespace {

// Returns how many rows were written.
template <typename T>
int64_t sum_rows(Control& c, const Tensor& expert_out, const Item& it, size_t i, ItemSlot& s, const Slot& from,
                 const Slot& to) {
  const Geometry& g = c.geometry;
  const Taken taken = c.taken[s.slot];
  const auto* in = static_cast<const T*>(expert_out.const_data_ptr());
  const int64_t stride = expert_out.size(0) > 0 ? expert_out.stride(0) : 0;
  const int64_t* first = it.first.data() + i * c.local_experts();
  std::vector<float> acc(g.hidden);
  int64_t rows = 0;
  for (int64_t t = 0; taken.routed > 0 && t < taken.num_tokens; ++t) {
    bool any = false;
    for (int64_t k = 0; k < g.topk; ++k) {
      const Position p = from.position[t * g.topk + k];
      if (!position_ok(c, s, p)) {
        bad_position(c, Op::reply, s, it.layer, p);
        return rows;
      }
      if (p.expert < 0) continue;
      if (!any) std::fill(acc.begin(), acc.end(), 0.0f);
      any = true;
      accumulate(acc.data(), in + (first[p.expert] + p.rank) * stride, from.weight[t * g.topk + k], g.hidden);
    }
    if (!any) continue;
    narrow(reinterpret_cast<T*>(to.payload) + t * g.hidden, acc.data(), g.hidden);
    ++rows;
  }
  return rows;
}

void reply_cpu(const Tensor& expert_out, const Tensor& item, Tensor port, int64_t window) {
  constexpr Op op = Op::reply;
  Entry entry(window, kFfn, op);
  Control& c = entry.control();
  const Geometry& g = c.geometry;
  read_port(c, op, port);
  Item it = read_item(c, op, item);
  check_rows(op, "expert_out", expert_out, g.hidden);
  check_type(op, "expert_out", expert_out, payload_type(g));
  if (expert_out.size(0) < it.rows)
    raise(Kind::Argument, op, "expert_out has ", expert_out.size(0), " rows, but the item has ", it.rows);

  for (size_t i = 0; i < it.slots.size(); ++i) {
    ItemSlot& s = it.slots[i];
    if (!s.live) continue;
    const Taken taken = c.taken[s.slot];
    if (now_ns() - taken.at > c.deadline_ns) {
      ErrorRecord r = where(op, it.layer, s.stage, s.ring, s.sequence);
      r.kind = static_cast<int32_t>(Kind::Timeout);
      r.peer = s.region;
      close_region(c, r);
      continue;
    }
    const int64_t reply_slot = c.slot(c.role_rank, s.stage, s.ring);
    const Slot from(c.window, c.layout, s.slot), to(c.peer[s.region], c.layout, reply_slot);
    int64_t rows = 0;
    visit(payload_type(g), [&](auto v) { rows = sum_rows<decltype(v)>(c, expert_out, it, i, s, from, to); });
    if (!s.live) continue;
    *to.header = {kHeaderMagic, kWireVersion, c.generation, it.layer, taken.num_tokens, 0, s.sequence, taken.routed, 0};
    atomic(c.bytes_sent[s.region])
        .fetch_add(static_cast<int64_t>(sizeof(SlotHeader)) + rows * g.hidden * itemsize(g.dtype),
                   std::memory_order_relaxed);
    atomic(word(c.window, c.layout.flags, s.slot)).store(kEmpty, std::memory_order_release);
    c.taken[s.slot].sequence = -1;
    atomic(word(c.peer[s.region], c.layout.flags, reply_slot)).store(kReady, std::memory_order_release);
    atomic(c.counters[k_replies]).fetch_add(1, std::memory_order_relaxed);
  }
}

}  // namespace
}  // namespace afd

STABLE_TORCH_LIBRARY_IMPL(afd, CPU, m) { m.impl("reply", TORCH_BOX(&afd::reply_cpu)); }
