// dispatch: rows of x to the F ranks that need them, and the plan that explains them.
//   moves    T x H elements once per (token, F rank) that needs it, T x topk x 12 bytes of plan per F rank
//   casts    a row once, before its copies, where the payload is narrower than x
//   order    rows, plan, header; then every flag (release)
//   waits    never
//   fails    an id out of range, no free ring, a peer that ended: raises, nothing written
#include <cstring>

#include "convert.h"
#include "kernels.h"
#include "peers.h"

namespace afd {

void dispatch(Control& c, Port port, Rows x, const Ids& ids, const Weights& weights, int32_t* ticket) {
  constexpr Op op = Op::dispatch;
  const Geometry& g = c.geometry;
  const int64_t tokens = x.count;
  check_ids(op, ids, tokens, g.topk, g.num_experts);
  const int64_t sequence = c.next[port.stage], ring = ring_of(g, sequence);
  int64_t& busy = c.ring[port.stage * g.depth + ring];
  if (busy >= 0)
    raise(Kind::RingBusy, op, "stage ", port.stage, " has ", g.depth, " dispatches in flight (depth ", g.depth,
          "); combine the one with sequence ", busy, " first");
  check_peers(c, where(op, port.layer, port.stage, ring, sequence));

  const int64_t width = ticket_width(g.ffn_size);
  int32_t* masks = ticket + width;
  std::vector<Slot> slot;
  std::vector<Position*> position;
  std::vector<int32_t> counted(g.ffn_size * g.local_experts, 0);  // what lies in a peer's window is never read back
  std::vector<int32_t*> counts;
  for (int64_t f = 0; f < g.ffn_size; ++f) {
    const bool masked = atomic(c.masked[f]).load() != 0;
    slot.emplace_back(c.peer[f], c.layout, c.slot(c.role_rank, port.stage, ring));
    position.push_back(masked ? nullptr : slot[f].position);
    counts.push_back(counted.data() + f * g.local_experts);
  }
  plan(ids, tokens, g.topk, c.expert_map, g.ffn_size, position.data(), counts.data(), masks, width);

  const int64_t row_bytes = payload_row(g), stride = x.stride * itemsize(wide_dtype(g.dtype));
  const int64_t scales_each = scales_per_row(g);
  std::vector<uint8_t> cast(scales_each > 0 ? row_bytes : 0);
  std::vector<float> scales(scales_each);
  const char* row = static_cast<const char*>(x.data);
  std::vector<int64_t> rows(g.ffn_size, 0);
  for (int64_t t = 0; t < tokens; ++t, row += stride) {
    const void* payload = scales_each > 0 ? nullptr : row;
    for (int64_t f = 0; f < g.ffn_size; ++f)
      if (in_mask(masks + t * width, f) && position[f] != nullptr) {
        if (payload == nullptr) {
          quantize(cast.data(), scales.data(), reinterpret_cast<const uint16_t*>(row), g.hidden);
          payload = cast.data();
        }
        std::memcpy(slot[f].payload + t * row_bytes, payload, row_bytes);
        if (scales_each > 0) std::memcpy(slot[f].scale + t * scales_each, scales.data(), scales_each * sizeof(float));
        ++rows[f];
      }
  }

  for (int64_t f = 0; f < g.ffn_size; ++f) {
    if (position[f] == nullptr) continue;
    int32_t routed = 0;
    for (int64_t e = 0; e < g.local_experts; ++e) routed += counts[f][e];
    std::memcpy(slot[f].counts, counts[f], g.local_experts * sizeof(int32_t));
    for (int64_t t = 0; routed > 0 && t < tokens; ++t)
      for (int64_t k = 0; k < g.topk; ++k) slot[f].weight[t * g.topk + k] = weights.at(t, k);
    *slot[f].header = {
        kHeaderMagic, kWireVersion, c.generation, port.layer, static_cast<int32_t>(tokens), 0, sequence, routed, 0};
    const int64_t plan_bytes =
        routed > 0 ? tokens * g.topk * static_cast<int64_t>(sizeof(Position) + sizeof(float)) : 0;
    const int64_t header_bytes = static_cast<int64_t>(sizeof(SlotHeader)) + 4 * g.local_experts;
    count(c.bytes_sent[f], header_bytes + plan_bytes + rows[f] * (row_bytes + 4 * scales_each));
  }

  ticket[kTicketGeneration] = c.generation;
  ticket[kTicketStage] = port.stage;
  ticket[kTicketRing] = static_cast<int32_t>(ring);
  ticket[kTicketSequenceLow] = low(sequence);
  ticket[kTicketSequenceHigh] = high(sequence);
  ticket[kTicketLayer] = port.layer;
  ticket[kTicketTokens] = static_cast<int32_t>(tokens);
  busy = sequence;
  c.next[port.stage] = sequence + 1;
  count(c.counters[k_dispatches], 1);
  count(c.counters[k_tokens], tokens);
  for (int64_t f = 0; f < g.ffn_size; ++f)
    if (position[f] != nullptr)
      flag(c.peer[f], c.layout, c.slot(c.role_rank, port.stage, ring)).store(kReady, std::memory_order_release);
}

}  // namespace afd
