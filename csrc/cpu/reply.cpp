// reply: each token's weighted sum over this rank's own experts, back to the A rank that sent it.
//   moves    one row per (token, choice) in, one row per token that has any out, into the A rank's slot
//   order    last read of the slot, its dispatch flag to EMPTY, "taken" cleared, then (release) the reply flag: a reset
//            after the publish could erase the A rank's next dispatch
//   waits    never
//   fails    an item older than the deadline or a bad position: that region is closed, the others are answered
#include <algorithm>

#include "convert.h"
#include "kernels.h"

namespace afd {
namespace {

// Returns how many rows were written.
template <typename T>
int64_t sum_rows(Control& c, Rows expert_out, int32_t layer, ItemSlot& s, const Slot& from, const Slot& to) {
  const Geometry& g = c.geometry;
  const Taken taken = c.taken[s.slot];
  const int32_t* first = c.first + s.slot * g.local_experts;
  const auto* in = static_cast<const T*>(expert_out.data);
  struct Choice {
    const T* row;
    float weight;
  };
  std::vector<Choice> chosen;
  std::vector<float> acc(g.hidden);
  int64_t rows = 0;
  for (int64_t t = 0; taken.routed > 0 && t < taken.num_tokens; ++t) {
    chosen.clear();
    for (int64_t k = 0; k < g.topk; ++k) {
      const Position p = from.position[t * g.topk + k];
      if (!position_ok(c, s, p)) {
        bad_position(c, Op::reply, s, layer, p);
        return rows;
      }
      if (p.expert < 0) continue;
      chosen.push_back({in + (first[p.expert] + p.rank) * expert_out.stride, from.weight[t * g.topk + k]});
    }
    if (chosen.empty()) continue;
    std::fill(acc.begin(), acc.end(), 0.0f);
    size_t k = 0;
    for (; k + 1 < chosen.size(); k += 2)
      accumulate(acc.data(), chosen[k].row, chosen[k].weight, chosen[k + 1].row, chosen[k + 1].weight, g.hidden);
    if (k < chosen.size()) accumulate(acc.data(), chosen[k].row, chosen[k].weight, g.hidden);
    narrow(reinterpret_cast<T*>(to.payload) + t * g.hidden, acc.data(), g.hidden);
    ++rows;
  }
  return rows;
}

}  // namespace

void reply(Control& c, Item& item, Rows expert_out) {
  const Geometry& g = c.geometry;
  for (ItemSlot& s : item.slots) {
    if (!s.live) continue;
    const Taken taken = c.taken[s.slot];
    if (now_ns() - taken.at > c.deadline_ns) {
      ErrorRecord r = where(Op::reply, item.layer, s.stage, s.ring, s.sequence);
      r.kind = static_cast<int32_t>(Kind::Timeout);
      r.peer = s.region;
      close_region(c, r);
      continue;
    }
    const int64_t reply_slot = c.slot(c.role_rank, s.stage, s.ring);
    const Slot from(c.window, c.layout, s.slot), to(c.peer[s.region], c.layout, reply_slot);
    int64_t rows = 0;
    visit(wide_dtype(g.dtype), [&](auto v) { rows = sum_rows<decltype(v)>(c, expert_out, item.layer, s, from, to); });
    if (!s.live) continue;
    *to.header = {
        kHeaderMagic, kWireVersion, c.generation, item.layer, taken.num_tokens, 0, s.sequence, taken.routed, 0};
    count(c.bytes_sent[s.region], static_cast<int64_t>(sizeof(SlotHeader)) + rows * wide_row(g));
    count(c.counters[k_replies], 1);
    flag(c.window, c.layout, s.slot).store(kEmpty, std::memory_order_release);
    c.taken[s.slot].sequence = -1;
    flag(c.peer[s.region], c.layout, reply_slot).store(kReady, std::memory_order_release);
  }
}

}  // namespace afd
