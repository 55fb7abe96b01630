// dispatch: rows of x to the F ranks that need them, and the plan that explains them.
//   moves    T x H elements once per (token, F rank) that needs it; T x topk x 12 bytes of plan per F rank it concerns
//   order    rows, plan, header; then every flag (release)
//   waits    never
//   fails    bad argument, no free ring, a peer that ended: raises, nothing written
#include <torch/csrc/stable/library.h>

#include <cstring>

#include "peers.h"
#include "plan.h"

namespace afd {
namespace {

bool needs(const int32_t* mask, int64_t f) { return (static_cast<uint32_t>(mask[f / 32]) >> (f % 32)) & 1; }

Tensor dispatch_cpu(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights, Tensor port, int64_t window) {
  constexpr Op op = Op::dispatch;
  Entry entry(window, kAttention, op);
  Control& c = entry.control();
  const Geometry& g = c.geometry;
  const Port p = read_port(c, op, port);

  check_rows(op, "x", x, g.hidden);
  check_type(op, "x", x, payload_type(g));
  const int64_t tokens = x.size(0);
  if (tokens > g.tokens)
    raise(Kind::Argument, op, "x has ", tokens, " tokens, but the window's capacity is ", g.tokens,
          "; chunk longer batches");
  check_ids(op, topk_ids, tokens, g.topk);
  check_dim(op, "topk_weights", topk_weights, 2);
  check_size(op, "topk_weights", topk_weights, 0, tokens);
  check_size(op, "topk_weights", topk_weights, 1, g.topk);
  check_type(op, "topk_weights", topk_weights, ScalarType::Float);
  const Ids ids(topk_ids);
  check_plan(op, ids, tokens, g.topk, g.num_experts);

  const int64_t sequence = c.next[p.stage], ring = sequence % g.depth;
  int64_t& busy = c.ring[p.stage * g.depth + ring];
  if (busy >= 0)
    raise(Kind::RingBusy, op, "stage ", p.stage, " has ", g.depth, " dispatches in flight (depth ", g.depth,
          "); combine the one with sequence ", busy, " first");
  check_peers(c, where(op, p.layer, p.stage, ring, sequence));

  const int64_t width = ticket_width(g.ffn_size);
  Tensor ticket = torch::stable::new_zeros(x, {tokens + 1, width}, ScalarType::Int);
  auto* out = static_cast<int32_t*>(ticket.mutable_data_ptr());
  int32_t* masks = out + width;

  std::vector<Slot> slot;
  std::vector<Position*> position;
  std::vector<int32_t*> counts;
  for (int64_t f = 0; f < g.ffn_size; ++f) {
    slot.emplace_back(c.peer[f], c.layout, c.slot(c.role_rank, p.stage, ring));
    position.push_back(slot[f].position);
    counts.push_back(slot[f].counts);
    std::memset(slot[f].counts, 0, g.local_experts * sizeof(int32_t));
  }
  plan(ids, tokens, g.topk, c.expert_map, g.ffn_size, position.data(), counts.data(), masks, width);

  const int64_t row_bytes = g.hidden * itemsize(g.dtype), stride = x.stride(0) * itemsize(g.dtype);
  const char* row = static_cast<const char*>(x.const_data_ptr());
  std::vector<int64_t> rows(g.ffn_size, 0);
  for (int64_t t = 0; t < tokens; ++t, row += stride)
    for (int64_t f = 0; f < g.ffn_size; ++f)
      if (needs(masks + t * width, f)) {
        std::memcpy(slot[f].payload + t * row_bytes, row, row_bytes);
        ++rows[f];
      }

  const auto* weights = static_cast<const float*>(topk_weights.const_data_ptr());
  for (int64_t f = 0; f < g.ffn_size; ++f) {
    int32_t routed = 0;
    for (int64_t e = 0; e < g.local_experts; ++e) routed += slot[f].counts[e];
    for (int64_t t = 0; routed > 0 && t < tokens; ++t)
      for (int64_t k = 0; k < g.topk; ++k)
        slot[f].weight[t * g.topk + k] = weights[t * topk_weights.stride(0) + k * topk_weights.stride(1)];
    *slot[f].header = {
        kHeaderMagic, kWireVersion, c.generation, p.layer, static_cast<int32_t>(tokens), 0, sequence, routed, 0};
    atomic(c.bytes_sent[f])
        .fetch_add(static_cast<int64_t>(sizeof(SlotHeader)) + 4 * g.local_experts + rows[f] * row_bytes +
                       (routed > 0 ? tokens * g.topk * static_cast<int64_t>(sizeof(Position) + sizeof(float)) : 0),
                   std::memory_order_relaxed);
  }

  out[kTicketGeneration] = c.generation;
  out[kTicketStage] = p.stage;
  out[kTicketRing] = static_cast<int32_t>(ring);
  out[kTicketSequenceLow] = low(sequence);
  out[kTicketSequenceHigh] = high(sequence);
  out[kTicketLayer] = p.layer;
  busy = sequence;
  c.next[p.stage] = sequence + 1;
  atomic(c.counters[k_dispatches]).fetch_add(1, std::memory_order_relaxed);
  atomic(c.counters[k_tokens]).fetch_add(tokens, std::memory_order_relaxed);
  for (int64_t f = 0; f < g.ffn_size; ++f)
    atomic(word(c.peer[f], c.layout.flags, c.slot(c.role_rank, p.stage, ring)))
        .store(kReady, std::memory_order_release);
  return ticket;
}

}  // namespace
}  // namespace afd

STABLE_TORCH_LIBRARY_IMPL(afd, CPU, m) { m.impl("dispatch", TORCH_BOX(&afd::dispatch_cpu)); }
