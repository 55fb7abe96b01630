// combine: base + what the F ranks answered, summed in float32 in F-rank order and rounded once.
//   moves    one row per (token, F rank) that answers it; T x H of base in, T x H out
//   order    flag (acquire), header, rows; last read, then every flag back to EMPTY (release), then the ring is free
//   waits    for every F rank's reply, until poison, abort or the deadline
//   fails    stale ticket, bad argument: raises, the ring stays as it was; a peer's fault: error record, window stopped
#include <torch/csrc/stable/library.h>

#include <vector>

#include "convert.h"
#include "peers.h"
#include "wait.h"

namespace afd {
namespace {

struct Ticket {
  int32_t generation, stage, ring, layer;
  int64_t sequence;
};

Ticket read_ticket(const Control& c, const Tensor& ticket, const Port& p) {
  constexpr Op op = Op::combine;
  check_dim(op, "ticket", ticket, 2);
  check_type(op, "ticket", ticket, ScalarType::Int);
  check_size(op, "ticket", ticket, 1, ticket_width(c.geometry.ffn_size));
  if (!ticket.is_contiguous()) raise(Kind::Argument, op, "ticket is not contiguous");
  if (ticket.size(0) < 1) raise(Kind::Argument, op, "ticket has no rows");
  const auto* w = static_cast<const int32_t*>(ticket.const_data_ptr());
  const Ticket k{w[kTicketGeneration], w[kTicketStage], w[kTicketRing], w[kTicketLayer],
                 join(w[kTicketSequenceLow], w[kTicketSequenceHigh])};
  if (k.generation != c.generation)
    raise(Kind::Stale, op, "ticket is of generation ", k.generation, ", but the window is at ", c.generation);
  if (k.stage != p.stage) raise(Kind::Argument, op, "ticket is of stage ", k.stage, ", but port is of stage ", p.stage);
  if (k.layer != p.layer) raise(Kind::Argument, op, "ticket is of layer ", k.layer, ", but port is of layer ", p.layer);
  if (k.ring < 0 || k.ring >= c.geometry.depth || c.ring[k.stage * c.geometry.depth + k.ring] != k.sequence)
    raise(Kind::Stale, op, "ticket with sequence ", k.sequence, " of stage ", k.stage,
          " is not in flight; it was used before");
  return k;
}

void wait_for_replies(Control& c, const Ticket& k) {
  Backoff backoff;
  for (int32_t f = 0; f < c.peers;) {
    if (atomic(word(c.window, c.layout.flags, c.slot(f, k.stage, k.ring))).load(std::memory_order_acquire) == kReady) {
      ++f;
      continue;
    }
    ErrorRecord r = where(Op::combine, k.layer, k.stage, k.ring, k.sequence);
    // Any peer's end stops this window, whichever reply is awaited first.
    check_peers(c, r);
    if (atomic(c.abort).load() != 0) raise(Kind::Aborted, Op::combine, "the window is being reset or closed");
    if (atomic(c.failed).load() != 0) raise_failed(c, Op::combine);
    if (backoff.pause() > c.deadline_ns) {
      r.kind = static_cast<int32_t>(Kind::Timeout);
      r.peer = f;
      stop(c, r);
    }
  }
}

void check_reply(Control& c, const Ticket& k, int32_t f, const SlotHeader& h, int64_t tokens) {
  ErrorRecord r = where(Op::combine, k.layer, k.stage, k.ring, k.sequence);
  const auto differs = [&r](Field field, int64_t expected, int64_t seen) {
    r.field = static_cast<int32_t>(field);
    r.expected = expected;
    r.seen = seen;
    return expected != seen;
  };
  if (differs(Field::magic, kHeaderMagic, h.magic) || differs(Field::version, kWireVersion, h.version) ||
      differs(Field::generation, k.generation, h.generation) || differs(Field::sequence, k.sequence, h.sequence) ||
      differs(Field::layer, k.layer, h.layer) || differs(Field::num_tokens, tokens, h.num_tokens)) {
    r.kind = static_cast<int32_t>(Kind::Protocol);
    r.peer = f;
    stop(c, r);
  }
}

Tensor combine_cpu(const Tensor& ticket, const Tensor& base, Tensor port, int64_t window) {
  constexpr Op op = Op::combine;
  Entry entry(window, kAttention, op);
  Control& c = entry.control();
  const Geometry& g = c.geometry;
  const Port p = read_port(c, op, port);
  const Ticket k = read_ticket(c, ticket, p);
  const int64_t tokens = ticket.size(0) - 1, width = ticket.size(1);
  check_rows(op, "base", base, g.hidden);
  check_size(op, "base", base, 0, tokens);
  if (!is_float(base))
    raise(Kind::Argument, op, "base is ", dtype_name(base.scalar_type()), ", expected float32, bfloat16 or float16");

  wait_for_replies(c, k);
  std::vector<Slot> slot;
  for (int32_t f = 0; f < c.peers; ++f) {
    slot.emplace_back(c.window, c.layout, c.slot(f, k.stage, k.ring));
    check_reply(c, k, f, *slot[f].header, tokens);
  }

  Tensor out = torch::stable::new_empty(base, {tokens, g.hidden});
  const auto* masks = static_cast<const int32_t*>(ticket.const_data_ptr()) + width;
  std::vector<float> acc(g.hidden);
  visit(base.scalar_type(), [&](auto b) {
    using Base = decltype(b);
    visit(payload_type(g), [&](auto w) {
      using Payload = decltype(w);
      const auto* in = static_cast<const Base*>(base.const_data_ptr());
      auto* sum = static_cast<Base*>(out.mutable_data_ptr());
      for (int64_t t = 0; t < tokens; ++t) {
        widen(acc.data(), in + t * base.stride(0), g.hidden);
        for (int32_t f = 0; f < c.peers; ++f)
          if ((static_cast<uint32_t>(masks[t * width + f / 32]) >> (f % 32)) & 1)
            accumulate(acc.data(), reinterpret_cast<const Payload*>(slot[f].payload) + t * g.hidden, 1.0f, g.hidden);
        narrow(sum + t * g.hidden, acc.data(), g.hidden);
      }
    });
  });

  for (int32_t f = 0; f < c.peers; ++f)
    atomic(word(c.window, c.layout.flags, c.slot(f, k.stage, k.ring))).store(kEmpty, std::memory_order_release);
  c.ring[k.stage * g.depth + k.ring] = -1;
  atomic(c.counters[k_combines]).fetch_add(1, std::memory_order_relaxed);
  return out;
}

}  // namespace
}  // namespace afd

STABLE_TORCH_LIBRARY_IMPL(afd, CPU, m) { m.impl("combine", TORCH_BOX(&afd::combine_cpu)); }
