// combine: base + what the F ranks answered, summed in float32 in F-rank order and rounded once.
//   moves    one row per (token, F rank) that answers it; T x H of base in, T x H out
//   order    flag (acquire), header, rows; last read, then every flag back to EMPTY (release), then the ring is free
//   waits    for the reply of every F rank that is not masked, until poison, abort or the deadline
//   fails    stale ticket: raises, the ring stays as it was; a peer's fault: error record, window stopped
#include "convert.h"
#include "kernels.h"
#include "peers.h"
#include "wait.h"

namespace afd {

Ticket read_ticket(const Control& c, Port port, const int32_t* w, int64_t tokens) {
  constexpr Op op = Op::combine;
  const Ticket k{w[kTicketGeneration], w[kTicketStage], w[kTicketRing], w[kTicketLayer],
                 join(w[kTicketSequenceLow], w[kTicketSequenceHigh])};
  if (k.generation != c.generation)
    raise(Kind::Stale, op, "ticket is of generation ", k.generation, ", but the window is at ", c.generation);
  if (k.stage != port.stage)
    raise(Kind::Argument, op, "ticket is of stage ", k.stage, ", but port is of stage ", port.stage);
  if (k.layer != port.layer)
    raise(Kind::Argument, op, "ticket is of layer ", k.layer, ", but port is of layer ", port.layer);
  if (w[kTicketTokens] != tokens)
    raise(Kind::Argument, op, "ticket has ", tokens, " tokens, expected ", w[kTicketTokens], ", as many as were sent");
  if (k.sequence < 0 || k.ring < 0 || k.ring >= c.geometry.depth ||
      c.ring[k.stage * c.geometry.depth + k.ring] != k.sequence)
    raise(Kind::Stale, op, "ticket with sequence ", k.sequence, " of stage ", k.stage,
          " is not in flight; it was used before");
  return k;
}

namespace {

bool masked(Control& c, int32_t f) { return atomic(c.masked[f]).load() != 0; }

void wait_for_replies(Control& c, const Ticket& k) {
  Backoff backoff;
  bool late = false;
  for (int32_t f = 0; f < c.peers;) {
    const int32_t seen =
        masked(c, f) ? kReady : flag(c.window, c.layout, c.slot(f, k.stage, k.ring)).load(std::memory_order_acquire);
    if (seen == kReady) {
      ++f;
      continue;
    }
    ErrorRecord r = where(Op::combine, k.layer, k.stage, k.ring, k.sequence);
    if (seen != kEmpty) stop(c, bad_flag(r, f, seen));
    check_peers(c, r);  // any peer's end stops this window, whichever reply is awaited first
    if (atomic(c.abort).load() != 0) raise(Kind::Aborted, Op::combine, "the window is being reset or closed");
    if (atomic(c.failed).load() != 0) raise_failed(c, Op::combine);
    if (late) {
      r.kind = static_cast<int32_t>(Kind::Timeout);
      r.peer = f;
      stop(c, r);
    }
    late = backoff.pause() > c.deadline_ns;  // then one last look: it may have been this rank that was stopped
  }
}

void check_reply(Control& c, const Ticket& k, int32_t f, const SlotHeader& h, int64_t tokens) {
  const auto fails = [&](bool bad, Field field, int64_t expected, int64_t seen) {
    if (!bad) return false;
    ErrorRecord r = where(Op::combine, k.layer, k.stage, k.ring, k.sequence);
    r.kind = static_cast<int32_t>(Kind::Protocol);
    r.peer = f;
    name_word(r, field, expected, seen);
    stop(c, r);
  };
  reply_header_fails(k, tokens, h, fails);
}

}  // namespace

void combine(Control& c, const Ticket& k, const int32_t* masks, int64_t tokens, Rows base, DType base_type, void* out) {
  const Geometry& g = c.geometry;
  wait_for_replies(c, k);
  const int64_t width = ticket_width(g.ffn_size);
  std::vector<int32_t> answers;  // who is asked is decided once: a rank masked from now on has answered this ticket
  std::vector<Slot> slot;
  for (int32_t f = 0; f < c.peers; ++f) {
    slot.emplace_back(c.window, c.layout, c.slot(f, k.stage, k.ring));
    if (masked(c, f)) continue;
    check_reply(c, k, f, *slot[f].header, tokens);
    answers.push_back(f);
  }

  std::vector<float> acc(g.hidden);
  visit(base_type, [&](auto b) {
    using Base = decltype(b);
    visit(wide_dtype(g.dtype), [&](auto w) {
      using Payload = decltype(w);
      const auto* in = static_cast<const Base*>(base.data);
      auto* sum = static_cast<Base*>(out);
      for (int64_t t = 0; t < tokens; ++t) {
        widen(acc.data(), in + t * base.stride, g.hidden);
        for (const int32_t f : answers)
          if (in_mask(masks + t * width, f))
            accumulate(acc.data(), reinterpret_cast<const Payload*>(slot[f].payload) + t * g.hidden, 1.0f, g.hidden);
        narrow(sum + t * g.hidden, acc.data(), g.hidden);
      }
    });
  });

  for (const int32_t f : answers)
    flag(c.window, c.layout, c.slot(f, k.stage, k.ring)).store(kEmpty, std::memory_order_release);
  c.ring[k.stage * g.depth + k.ring] = -1;
  count(c.counters[k_combines], 1);
}

}  // namespace afd
