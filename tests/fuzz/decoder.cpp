// decoder: hostile bytes against the code that reads slots. Built with ASan and UBSan.
//
// A program is a byte string: a geometry, a seed for the routing, and writes by which a broken peer changes words of
// the windows at four moments of two round trips. Any byte string is a program. Everything else is honest: A ranks
// dispatch and combine, F ranks arrive, receive, compute and reply. Checked after every step:
//   memory    ASan, UBSan, guard pages, poisoned gaps; and by comparison with a copy, every byte that changed in any
//             window is one that this step may write
//   F         never raises; takes only what is well formed; closes the region of what is not, and the record names a
//             word that was wrong; what it answers is what the slot said, bit for bit
//   A         combine gives base + the replies, or stops with the record that the window's content asks for
//   others    an A rank no write has touched is answered exactly, whatever the others did
//
//   decoder                        programs on stdin, each preceded by its length (uint32); one line of outcome each
//   decoder random SEED PROGRAMS   programs made here, a summary
//   decoder names                  the vocabulary of the encoding, for whoever writes programs
// An argument `strict` before these asks for an error in more cases: see `strict` below.
// With AFD_LIBFUZZER it is a libFuzzer target.
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#include <cstdio>
#include <map>
#include <set>
#include <sstream>
#include <string>

#include "program.h"
#include "shadow.h"

namespace afd::fuzz {
namespace {

// Ill-formed, but harmless to memory and to other regions, so that only `strict` asks for a record:
//   positions that are in range but not 0, 1, 2 .. per expert, as the plan numbers them: some rows belong to no choice
//   a flag word that is neither EMPTY nor READY
bool strict = false;

using Faults = uint32_t;  // a set of Field
constexpr Faults bit(Field f) { return 1u << static_cast<int32_t>(f); }

// Every way in which a dispatch's header breaks the protocol: from wire.h's words, not from arrive's code.
Faults dispatch_faults(const Control& c, int64_t index) {
  const Geometry& g = c.geometry;
  const Slot slot(c.window, c.layout, index);
  const SlotHeader& h = *slot.header;
  Faults faults = 0;
  if (h.magic != kHeaderMagic) faults |= bit(Field::magic);
  if (h.version != kWireVersion) faults |= bit(Field::version);
  if (h.generation != kGeneration) faults |= bit(Field::generation);
  if (h.flags != 0) faults |= bit(Field::flags);
  if (h.layer < 0 || h.layer >= g.layers) faults |= bit(Field::layer);
  if (h.num_tokens < 0 || h.num_tokens > g.tokens) faults |= bit(Field::num_tokens);
  if (h.sequence < 0) faults |= bit(Field::sequence);
  if (h.sequence % g.depth != index % g.depth) faults |= bit(Field::ring);
  int64_t sum = 0;
  for (int32_t e = 0; e < g.local_experts; ++e) {
    if (slot.counts[e] < 0 || (e >= c.local_experts() && slot.counts[e] != 0)) faults |= bit(Field::counts);
    sum += slot.counts[e];
  }
  if (sum != h.routed || sum > h.num_tokens * g.topk) faults |= bit(Field::counts);
  return faults;
}

Faults reply_faults(const Ticket& k, int32_t tokens, const SlotHeader& h) {
  Faults faults = 0;
  if (h.magic != kHeaderMagic) faults |= bit(Field::magic);
  if (h.version != kWireVersion) faults |= bit(Field::version);
  if (h.generation != kGeneration) faults |= bit(Field::generation);
  if (h.sequence != k.sequence) faults |= bit(Field::sequence);
  if (h.layer != k.layer) faults |= bit(Field::layer);
  if (h.flags != 0) faults |= bit(Field::flags);
  if (h.num_tokens != tokens) faults |= bit(Field::num_tokens);
  return faults;
}

// A slot as F took it, in the order of its item.
struct TakenSlot {
  int32_t region, stage, ring, tokens, routed, layer;
  int64_t index, sequence, reply;  // reply: its index in the A rank's window
  std::vector<int32_t> counts;
  std::vector<int64_t> first;  // row of the first choice of each local expert
};

struct Work {
  std::vector<int32_t> item;
  std::vector<TakenSlot> slots;
  int64_t rows = 0;
  std::unique_ptr<Guarded> in, scales, out;
};

class Run {
 public:
  Run(const uint8_t* data, size_t size)
      : program_(data, size), cluster_(read_geometry(program_)), shadow_(cluster_), random_(0) {
    modes_ = program_.next(256);
    random_ = Random(program_.next(256));
    while (program_.more() && writes_.size() < 64) writes_.push_back(read_write(program_));
    const Geometry& g = cluster_.g;
    touched_.assign(g.attention_size, false);
    for (auto& f : cluster_.f)
      if (mode(Mode::tight)) f->c.rows = g.tokens * g.topk;
    for (auto& a : cluster_.a) a->c.deadline_ns = 0;
    shadow_.remember();
  }

  // The outcome in words: each closed region and stopped window with its record, then what went well.
  std::string operator()() {
    for (int32_t round = 0; round < 2; ++round) {
      steps_.assign(cluster_.a.size(), {});
      for (auto& a : cluster_.a) dispatch_all(*a);
      apply(round, Moment::arrive);
      const bool late = mode(Mode::late) && round == 1;
      if (mode(Mode::one_by_one)) {
        serve_one_by_one(round, late);
      } else {
        serve_together(round, late);
      }
      apply(round, Moment::combine);
      for (auto& a : cluster_.a) combine_all(*a, late);
    }
    step_name = "the end";
    for (auto& a : cluster_.a) finish(*a, 'a', a->c.role_rank);
    for (auto& f : cluster_.f) finish(*f, 'f', f->c.role_rank);
    std::ostringstream s;
    for (const std::string& word : outcome_) s << word << ' ';
    s << "answered=" << answered_ << " combined=" << combined_;
    return s.str();
  }

 private:
  bool mode(Mode m) const { return (modes_ >> static_cast<int32_t>(m)) & 1; }
  const Control& peer(const Control& c, int32_t p) const {
    return (c.role == kAttention ? cluster_.f : cluster_.a)[p]->c;
  }

  void apply(int32_t round, Moment moment) {
    for (const Write& w : writes_)
      if (w.round == round && w.moment == static_cast<int32_t>(moment))
        if (const int32_t a = carry_out(w, cluster_); a >= 0) touched_[a] = true;
    shadow_.remember();
  }

  // ---- error records

  const ErrorRecord& record_of(const Control& c, int32_t peer) {
    const ErrorRecord& r = c.records[peer];
    if (r.valid != 1 || r.peer != peer) wrong("world rank ", shadow_.world(c), " has no record of peer ", peer);
    if (r.kind < 0 || r.kind > static_cast<int32_t>(Kind::Protocol) || r.field < 0 || r.field > 31)
      wrong("a record of kind ", r.kind, ", field ", r.field);
    if (describe(c, r).empty()) wrong("a record without words");
    std::ostringstream s;
    s << (c.role == kAttention ? 'a' : 'f') << c.role_rank << '.' << peer << '=' << name(static_cast<Kind>(r.kind));
    if (r.kind == static_cast<int32_t>(Kind::Protocol)) s << ':' << name(static_cast<Field>(r.field));
    outcome_.insert(s.str());
    return r;
  }

  bool is(const ErrorRecord& r, Kind kind) const { return r.kind == static_cast<int32_t>(kind); }
  bool is(const ErrorRecord& r, Faults fields) const { return is(r, Kind::Protocol) && (fields >> r.field & 1) != 0; }

  // ---- F

  template <typename Call>
  void never_raises(const char* op, const Control& c, Call&& call) {
    step_name = op;
    step_name += " on ffn " + std::to_string(c.role_rank);
    try {
      call();
    } catch (const std::exception& e) {
      wrong("ffn ", c.role_rank, " raised: ", e.what());
    }
    if (c.failed != 0) wrong("ffn ", c.role_rank, " stopped its window for the fault of one region");
  }

  bool arrive(Rank& f, Work& work) {
    Control& c = f.c;
    const std::vector<int32_t> alive_before(c.region, c.region + c.peers);
    std::vector<int64_t> taken_before;
    for (int64_t i = 0; i < c.slots(); ++i) taken_before.push_back(c.taken[i].sequence);
    work.item.assign((1 + c.slots()) * kItemWords, 0);
    never_raises("arrive", c, [&] { afd::arrive(c, work.item.data()); });

    const auto candidate = [&](int64_t i) { return taken_before[i] < 0 && flag_of(c, i) == kReady; };
    const auto odd_flag = [&](int64_t i) { return flag_of(c, i) != kReady && flag_of(c, i) != kEmpty; };
    const auto any_slot_of = [&](int32_t p, auto&& test) {
      const int64_t n = c.layout.slots_per_region;
      for (int64_t i = p * n; i < (p + 1) * n; ++i)
        if (test(i)) return true;
      return false;
    };
    const int32_t count = work.item[kItemCount];
    for (int32_t p = 0; p < c.peers; ++p) {
      if (alive_before[p] != kAlive) {
        if (c.region[p] != alive_before[p]) wrong("region ", p, " was closed twice");
        continue;
      }
      Faults faults = 0;
      any_slot_of(p, [&](int64_t i) {
        if (candidate(i)) faults |= dispatch_faults(c, i);
        if (odd_flag(i)) faults |= bit(Field::flags);
        return false;
      });
      const int32_t sticky = sticky_of(c, p);
      if (c.region[p] == kAlive) {
        if (sticky != kAlive) wrong("region ", p, " is alive under sticky word ", sticky);
        if (count == 0 && any_slot_of(p, candidate)) wrong("nothing arrived, but a slot of region ", p, " is ready");
        if (count == 0 && strict && any_slot_of(p, odd_flag))
          wrong("region ", p, " is alive with a flag of no meaning");
      } else if (sticky == kLeft) {
        if (c.region[p] != kLeft) wrong("region ", p, " left and is now ", c.region[p]);
      } else {
        const ErrorRecord& r = record_of(c, p);
        const bool right = sticky != kAlive ? is(r, Kind::PeerFailed) && r.seen == sticky : is(r, faults);
        if (!right) wrong("region ", p, " was closed by ", describe(c, r), "; its faults are ", faults);
        shadow_.allow_sticky(peer(c, p), c.role_rank);
        shadow_.poisoned(peer(c, p), c);
      }
    }

    if (count < 0 || count > c.slots()) wrong("an item of ", count, " slots");
    std::set<int64_t> seen;
    for (int32_t i = 0; i < count; ++i) {
      const int32_t* s = work.item.data() + (1 + i) * kItemWords;
      TakenSlot slot{};
      slot.region = s[kItemRegion];
      slot.stage = s[kItemStage];
      slot.ring = s[kItemRing];
      if (slot.region < 0 || slot.region >= c.peers || slot.stage < 0 || slot.stage >= c.geometry.stages ||
          slot.ring < 0 || slot.ring >= c.geometry.depth)
        wrong("an item with slot (", slot.region, ", ", slot.stage, ", ", slot.ring, ")");
      slot.index = c.slot(slot.region, slot.stage, slot.ring);
      slot.reply = c.slot(c.role_rank, slot.stage, slot.ring);
      const Slot wire(c.window, c.layout, slot.index);
      const SlotHeader& h = *wire.header;
      if (!seen.insert(slot.index).second || alive_before[slot.region] != kAlive || !candidate(slot.index))
        wrong("slot ", slot.index, " was not there to be taken");
      if (dispatch_faults(c, slot.index) != 0) wrong("slot ", slot.index, " was taken with an ill-formed header");
      if (join(s[kItemSequenceLow], s[kItemSequenceHigh]) != h.sequence || s[kItemTokens] != h.num_tokens ||
          s[kItemRouted] != h.routed || work.item[kItemLayer] != h.layer)
        wrong("the item does not say what slot ", slot.index, " holds");
      if (c.region[slot.region] == kAlive && c.taken[slot.index].sequence != h.sequence)
        wrong("slot ", slot.index, " is not marked as taken");
      slot.sequence = h.sequence;
      slot.tokens = h.num_tokens;
      slot.routed = h.routed;
      slot.layer = h.layer;
      slot.counts.assign(wire.counts, wire.counts + c.geometry.local_experts);
      work.rows += slot.routed;
      work.slots.push_back(slot);
    }
    if (work.item[kItemRows] != work.rows || (count > 1 && work.rows > c.rows))
      wrong("an item of ", work.item[kItemRows], " rows; its slots have ", work.rows, ", the capacity is ", c.rows);
    for (int64_t e = 0, row = 0; e < c.local_experts(); ++e)
      for (TakenSlot& slot : work.slots) {
        slot.first.push_back(row);
        row += slot.counts[e];
      }
    shadow_.check();
    return count > 0;
  }

  // What the positions of a slot are worth now: in range, and 0, 1, 2 .. per expert as the plan numbers them.
  enum class Positions { good, loose, bad };
  Positions positions(const Control& c, const TakenSlot& s) const {
    if (s.routed == 0) return Positions::good;  // then they are not part of the message
    const Slot wire(c.window, c.layout, s.index);
    std::vector<int32_t> next(s.counts.size(), 0);
    bool loose = false;
    for (int64_t n = 0; n < s.tokens * c.geometry.topk; ++n) {
      const Position& p = wire.position[n];
      if (p.expert == -1) continue;
      if (p.expert < 0 || p.expert >= c.local_experts() || p.rank < 0 || p.rank >= s.counts[p.expert])
        return Positions::bad;
      loose |= p.rank != next[p.expert]++;
    }
    return loose || next != s.counts ? Positions::loose : Positions::good;
  }

  // After receive or reply, the regions among the item's slots that are closed now and were not before.
  template <typename Right>
  void check_closed(const Control& c, const std::vector<int32_t>& alive_before, const Work& work, Right&& right) {
    for (int32_t p = 0; p < c.peers; ++p) {
      if (c.region[p] == alive_before[p]) continue;
      const ErrorRecord& r = record_of(c, p);
      bool ours = false;
      for (const TakenSlot& s : work.slots) ours |= s.region == p && right(s, r);
      if (!ours) wrong("region ", p, " was closed without cause: ", describe(c, r));
      shadow_.allow_sticky(peer(c, p), c.role_rank);
      shadow_.poisoned(peer(c, p), c);
    }
  }

  void receive(Rank& f, Work& work) {
    Control& c = f.c;
    const Geometry& g = c.geometry;
    const int64_t row_bytes = payload_row(g), scale_bytes = 4 * scales_per_row(g);
    const std::vector<int32_t> alive_before(c.region, c.region + c.peers);
    work.in = std::make_unique<Guarded>(work.rows * row_bytes);
    work.scales = std::make_unique<Guarded>(work.rows * scale_bytes);
    work.out = std::make_unique<Guarded>(work.rows * wide_row(g));
    std::memset(work.in->data(), 0xFF, work.in->size());
    std::memset(work.scales->data(), 0xFF, work.scales->size());
    auto* scales = reinterpret_cast<float*>(work.scales->data());
    never_raises("receive", c, [&] {
      Item item = read_item(c, Op::receive, work.item.data());
      if (item.rows != work.rows) wrong("the item has ", item.rows, " rows now, had ", work.rows);
      afd::receive(c, item, work.in->data(), scales);
      run_experts(c, item, work.in->data(), scales, work.out->data());
    });

    check_closed(c, alive_before, work, [&](const TakenSlot& s, const ErrorRecord& r) {
      return positions(c, s) != Positions::good && is(r, bit(Field::position) | bit(Field::counts));
    });
    std::vector<char> rows(work.rows * row_bytes, static_cast<char>(0xFF));
    std::vector<char> factors(work.rows * scale_bytes, static_cast<char>(0xFF));
    for (const TakenSlot& s : work.slots) {
      if (alive_before[s.region] != kAlive) continue;
      const Positions worth = positions(c, s);
      const bool closed = c.region[s.region] != kAlive;
      if (!closed && (worth == Positions::bad || (strict && worth == Positions::loose)))
        wrong("slot ", s.index, " was received with bad positions");
      const Slot wire(c.window, c.layout, s.index);
      for (int64_t n = 0; s.routed > 0 && n < s.tokens * g.topk; ++n) {
        const Position& p = wire.position[n];
        if (closed || p.expert < 0) continue;
        const int64_t row = s.first[p.expert] + p.rank, token = n / g.topk;
        std::copy_n(wire.payload + token * row_bytes, row_bytes, rows.begin() + row * row_bytes);
        std::copy_n(reinterpret_cast<char*>(wire.scale) + token * scale_bytes, scale_bytes,
                    factors.begin() + row * scale_bytes);
      }
    }
    for (const TakenSlot& s : work.slots) {  // a closed slot's rows are nobody's
      const auto same_bytes = [&s](const std::vector<char>& sent, const Guarded& got, int64_t each, int64_t e) {
        return std::equal(sent.begin() + s.first[e] * each, sent.begin() + (s.first[e] + s.counts[e]) * each,
                          got.data() + s.first[e] * each);
      };
      for (int64_t e = 0; c.region[s.region] == kAlive && e < c.local_experts(); ++e)
        if (!same_bytes(rows, *work.in, row_bytes, e) || !same_bytes(factors, *work.scales, scale_bytes, e))
          wrong("rows of slot ", s.index, ", expert ", e, " are not what it sent");
    }
    shadow_.check();
  }

  void reply(Rank& f, Work& work, bool late) {
    Control& c = f.c;
    const Geometry& g = c.geometry;
    const std::vector<int32_t> alive_before(c.region, c.region + c.peers);
    std::map<int64_t, std::pair<int32_t, int32_t>> flags_before;  // the dispatch's and the reply's
    for (const TakenSlot& s : work.slots) {
      const Control& a = peer(c, s.region);
      flags_before[s.index] = {flag_of(c, s.index), flag_of(a, s.reply)};
      if (alive_before[s.region] != kAlive) continue;
      const Slot to(a.window, a.layout, s.reply);
      shadow_.allow_flag(c, s.index);
      shadow_.allow_flag(a, s.reply);
      shadow_.allow(a, to.header, sizeof(SlotHeader));
      shadow_.allow(a, to.payload, s.tokens * wide_row(g));
    }
    const int64_t deadline = c.deadline_ns;
    if (late) c.deadline_ns = -1;
    never_raises("reply", c, [&] {
      Item item = read_item(c, Op::reply, work.item.data());
      if (item.rows != work.rows) wrong("the item has ", item.rows, " rows now, had ", work.rows);
      afd::reply(c, item, {work.out->data(), work.rows, g.hidden});
    });
    c.deadline_ns = deadline;

    check_closed(c, alive_before, work, [&](const TakenSlot& s, const ErrorRecord& r) {
      return late ? is(r, Kind::Timeout) : positions(c, s) != Positions::good && is(r, bit(Field::position));
    });
    std::set<int32_t> closed;
    for (const TakenSlot& s : work.slots) {
      const Control& a = peer(c, s.region);
      const std::pair<int32_t, int32_t> before = flags_before[s.index], after{flag_of(c, s.index), flag_of(a, s.reply)};
      const std::pair<int32_t, int32_t> answered{kEmpty, kReady};
      const Positions worth = positions(c, s);
      const bool refused = alive_before[s.region] != kAlive || late || worth == Positions::bad;
      // A region may be closed by one slot of an item after, or before, another one was answered.
      const bool open = closed.count(s.region) == 0 && (worth == Positions::good || c.region[s.region] == kAlive);
      if (refused) closed.insert(s.region);
      if (refused && after != before) wrong("slot ", s.index, " was answered");
      if (!refused && open && after != answered) wrong("slot ", s.index, " was not answered");
      if (refused || after != answered || (!open && before == answered)) continue;
      if (c.taken[s.index].sequence != -1) wrong("slot ", s.index, " is answered and still taken");
      check_reply(c, a, s, work);
      ++answered_;
    }
    shadow_.check();
  }

  void check_reply(const Control& c, const Control& a, const TakenSlot& s, const Work& work) {
    const Geometry& g = c.geometry;
    const Slot from(c.window, c.layout, s.index), to(a.window, a.layout, s.reply);
    const int64_t wide = wide_dtype(g.dtype);
    const SlotHeader right{kHeaderMagic, kWireVersion, kGeneration, s.layer, s.tokens, 0, s.sequence, s.routed, 0};
    if (std::memcmp(&right, to.header, sizeof(right)) != 0) wrong("the header of the reply to slot ", s.index);
    for (int64_t i = 0; s.routed > 0 && i < s.tokens * g.hidden; ++i) {
      const int64_t t = i / g.hidden, h = i % g.hidden;
      float sum = 0;
      bool any = false;
      for (int64_t n = t * g.topk; n < (t + 1) * g.topk; ++n) {
        const Position& p = from.position[n];
        if (p.expert < 0) continue;
        any = true;
        sum += from.weight[n] * load(wide, work.out->data(), (s.first[p.expert] + p.rank) * g.hidden + h);
      }
      if (any && !same(rounded(wide, sum), load(wide, to.payload, i))) wrong("row ", t, " of slot ", s.index);
    }
  }

  static bool same(float a, float b) { return a == b || (a != a && b != b); }

  void serve_one_by_one(int32_t round, bool late) {
    bool first = true;
    for (auto& f : cluster_.f)
      for (int64_t items = 0;; ++items) {
        Work work;
        if (!arrive(*f, work)) break;
        if (first) apply(round, Moment::receive);
        receive(*f, work);
        if (first) apply(round, Moment::reply);
        reply(*f, work, late);
        first = false;
        if (items > 2 * f->c.slots()) wrong("arrive finds no end");
      }
  }

  // Everything arrives before anything is received: several items are in flight. What the writes made ready after that
  // is served at the end.
  void serve_together(int32_t round, bool late) {
    std::vector<std::vector<Work>> work(cluster_.f.size());
    for (size_t j = 0; j < work.size(); ++j)
      for (;;) {
        Work w;
        if (!arrive(*cluster_.f[j], w)) break;
        work[j].push_back(std::move(w));
        if (static_cast<int64_t>(work[j].size()) > cluster_.f[j]->c.slots()) wrong("arrive finds no end");
      }
    apply(round, Moment::receive);
    for (size_t j = 0; j < work.size(); ++j)
      for (Work& w : work[j]) receive(*cluster_.f[j], w);
    apply(round, Moment::reply);
    for (size_t j = 0; j < work.size(); ++j)
      for (Work& w : work[j]) reply(*cluster_.f[j], w, late);
    serve_one_by_one(-1, late);
  }

  // ---- A

  // What stops an A rank poisons every F rank; its record is the one that `failed` names.
  const ErrorRecord& stopped(const Control& c) {
    if (c.failed < 1 || c.failed > c.peers) wrong("attention ", c.role_rank, " stopped with failed = ", c.failed);
    for (int32_t f = 0; f < c.peers; ++f) {
      shadow_.allow_sticky(peer(c, f), c.role_rank);
      shadow_.poisoned(peer(c, f), c);
    }
    return record_of(c, c.failed - 1);
  }

  template <typename Call>
  bool raises(const char* op, const Control& c, Call&& call) {
    step_name = op;
    step_name += " on attention " + std::to_string(c.role_rank);
    try {
      call();
    } catch (const std::runtime_error&) {
      if (!touched_[c.role_rank] && !late_) wrong("attention ", c.role_rank, ", which nobody touched, was stopped");
      return true;
    }
    return false;
  }

  bool any_sticky(const Control& c) const {
    for (int32_t f = 0; f < c.peers; ++f)
      if (sticky_of(c, f) != kAlive) return true;
    return false;
  }

  void check_ended(const Control& c, const ErrorRecord& r) {
    const int32_t sticky = sticky_of(c, r.peer);
    if (sticky == kAlive || r.seen != sticky || !is(r, sticky == kLeft ? Kind::PeerLeft : Kind::PeerFailed))
      wrong("sticky word ", sticky, " gave ", describe(c, r));
  }

  void dispatch_all(Rank& a) {
    Control& c = a.c;
    const Geometry& g = c.geometry;
    for (int32_t stage = 0; stage < g.stages; ++stage)
      for (int32_t n = random_.within(1, static_cast<int32_t>(g.depth)); n > 0; --n) {
        Step step(g, random_, stage);
        if (c.failed != 0) continue;
        const bool ended = any_sticky(c);
        const int64_t ring = c.next[stage] % g.depth;
        if (raises("dispatch", c, [&] { step.dispatch(c); })) {
          if (!ended) wrong("attention ", c.role_rank, " could not dispatch");
          check_ended(c, stopped(c));
        } else {
          if (ended) wrong("attention ", c.role_rank, " dispatched to a peer that had ended");
          for (int32_t f = 0; f < c.peers; ++f) {
            const Control& to = peer(c, f);
            const int64_t index = c.slot(c.role_rank, stage, ring);
            shadow_.allow_flag(to, index);
            shadow_.allow(to, Slot(to.window, to.layout, index).header, to.layout.slot_bytes);
          }
          steps_[c.role_rank].push_back(std::move(step));
        }
        shadow_.check();
      }
  }

  void combine_all(Rank& a, bool late) {
    late_ |= late;
    for (Step& step : steps_[a.c.role_rank])
      if (a.c.failed == 0) combine(a.c, step);
  }

  void combine(Control& c, Step& step) {
    const Geometry& g = c.geometry;
    step_name = "combine";
    const Ticket k = read_ticket(c, step.port, step.ticket.data(), step.tokens);
    Faults faults = 0;  // of the first reply that has any
    int32_t missing = -1, faulty = -1, odd = -1;
    std::vector<int64_t> slot;
    for (int32_t f = 0; f < c.peers; ++f) {
      slot.push_back(c.slot(f, k.stage, k.ring));
      const int32_t flag = flag_of(c, slot[f]);
      if (flag != kReady && missing < 0) missing = f;
      if (flag != kReady && flag != kEmpty && odd < 0) odd = f;
      if (faults != 0) continue;
      faults = reply_faults(k, step.tokens, *Slot(c.window, c.layout, slot[f]).header);
      faulty = f;
    }
    const bool ended = any_sticky(c);
    const bool raised = raises("combine", c, [&] { step.combine(c); });
    if (!raised) {
      if (missing >= 0 || faults != 0) wrong("combine took an ill-formed reply");
      for (const int64_t s : slot) {
        shadow_.allow_flag(c, s);
        if (flag_of(c, s) != kEmpty) wrong("combine left a flag");
      }
      if (c.ring[k.stage * g.depth + k.ring] != -1) wrong("combine left its ring busy");
      check_sum(c, step, slot);
      if (!touched_[c.role_rank] && !late_ && !step.exact(g)) wrong("attention ", c.role_rank, " got a wrong sum");
      ++combined_;
    } else {
      const ErrorRecord& r = stopped(c);
      if (c.ring[k.stage * g.depth + k.ring] != k.sequence) wrong("a combine that failed freed its ring");
      if (missing < 0) {
        if (r.peer != faulty || !is(r, faults)) wrong("faults ", faults, " gave ", describe(c, r));
      } else if (is(r, Kind::Protocol)) {
        if (odd < 0 || r.peer != odd || !is(r, bit(Field::flags))) wrong("a flag gave ", describe(c, r));
      } else if (ended) {
        check_ended(c, r);
      } else if (!is(r, Kind::Timeout) || r.peer != missing || (strict && odd == missing)) {
        wrong("the missing reply of ", missing, " gave ", describe(c, r));
      }
    }
    shadow_.check();
  }

  void check_sum(const Control& c, const Step& step, const std::vector<int64_t>& slot) {
    const Geometry& g = c.geometry;
    for (int64_t i = 0; i < step.tokens * g.hidden; ++i) {
      float sum = load(step.base_type, step.base_bytes.data(), i);
      for (int32_t f = 0; f < c.peers; ++f)
        if (in_mask(step.masks(g) + i / g.hidden * ticket_width(g.ffn_size), f))
          sum += load(wide_dtype(g.dtype), Slot(c.window, c.layout, slot[f]).payload, i);
      if (!same(rounded(step.base_type, sum), load(step.base_type, step.out.data(), i)))
        wrong("element ", i, " of attention ", c.role_rank, "'s sum");
    }
  }

  void finish(Rank& r, char role, int32_t role_rank) {
    const Control& c = r.c;
    for (int32_t p = 0; c.role == kFfn && p < c.peers; ++p)
      if (!touched_[p] && !late_ && (c.region[p] != kAlive || c.records[p].claimed != 0))
        wrong("region ", p, " of ffn ", role_rank, " was closed, but nobody touched it");
    const int64_t broken = r.broken_canary();
    if (broken >= 0) wrong("the canary at byte ", broken, " of ", role, role_rank, "'s window is gone");
  }

  Program program_;
  Cluster cluster_;
  Shadow shadow_;
  Random random_;
  int32_t modes_ = 0;
  bool late_ = false;
  std::vector<Write> writes_;
  std::vector<bool> touched_;  // A ranks whose window, or region in an F window, was written to
  std::vector<std::vector<Step>> steps_;
  std::set<std::string> outcome_;
  int64_t answered_ = 0, combined_ = 0;
};

std::string run(const uint8_t* data, size_t size) {
  program_hex.clear();
  char digits[3];
  for (size_t i = 0; i < size; ++i) {
    std::snprintf(digits, sizeof(digits), "%02x", data[i]);
    program_hex += digits;
  }
  step_name = "the start";
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_set_death_callback(say_where);
#endif
  return Run(data, size)();
}

}  // namespace
}  // namespace afd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  afd::fuzz::run(data, size);
  return 0;
}

#if !defined(AFD_LIBFUZZER)
namespace afd::fuzz {
namespace {

template <size_t N>
void print_names(const char* of, const char* const (&names)[N]) {
  std::printf("%s", of);
  for (const char* name : names) std::printf(" %s", name);
  std::printf("\n");
}

int run_stdin() {
  std::vector<uint8_t> program;
  for (uint32_t size = 0; std::fread(&size, sizeof(size), 1, stdin) == 1;) {
    if (size > 1 << 16) return 2;
    program.resize(size);
    if (std::fread(program.data(), 1, size, stdin) != size) return 2;
    std::printf("%s\n", run(program.data(), size).c_str());
  }
  return 0;
}

int run_random(uint64_t seed, int64_t programs) {
  Random random(seed);
  std::map<std::string, int64_t> seen;
  for (int64_t i = 0; i < programs; ++i) {
    std::vector<uint8_t> program(random.within(10, 10 + 8 * random.within(1, 10)));
    for (uint8_t& b : program) b = static_cast<uint8_t>(random.next());
    program[9] &= random.next();  // the modes: `late` stops the second round trip, so not too often
    std::istringstream words(run(program.data(), program.size()));
    for (std::string word; words >> word;) {
      const size_t dot = word.find('.'), is = word.find('=');
      if (dot < is)
        ++seen[word.substr(0, 1) + word.substr(is)];
      else
        seen[word.substr(0, is)] += std::stoll(word.substr(is + 1));
    }
  }
  for (const auto& [word, times] : seen) std::printf("%s %lld\n", word.c_str(), static_cast<long long>(times));
  return 0;
}

}  // namespace
}  // namespace afd::fuzz

int main(int argc, char** argv) {
  using namespace afd::fuzz;
  std::vector<std::string> args(argv + 1, argv + argc);
  if (!args.empty() && args[0] == "strict") {
    strict = true;
    args.erase(args.begin());
  }
  if (args.empty()) return run_stdin();
  if (args[0] == "random" && args.size() == 3) return run_random(std::stoull(args[1]), std::stoll(args[2]));
  if (args[0] != "names") return 2;
  print_names("fields", kFields);
  print_names("values", kValues);
  print_names("moments", kMoments);
  print_names("modes", kModes);
  return 0;
}
#endif
