#include "control.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstring>

namespace afd {

namespace {

constexpr const char* kKindNames[] = {
#define X(name) #name,
    AFD_KINDS(X)
#undef X
};
constexpr const char* kOpNames[] = {
#define X(name) #name,
    AFD_OPS(X)
#undef X
};
constexpr const char* kFieldNames[] = {
#define X(name) #name,
    AFD_FIELDS(X)
#undef X
};

// Module state: an op is handed an id and must find its window without Python. Entries are only ever added.
constexpr int64_t kMaxWindows = 1 << 16;
std::array<std::atomic<Control*>, kMaxWindows> g_windows{};
std::atomic<int64_t> g_next{1};

// This process's id, without a system call per op; a fork must not use its parent's windows.
std::atomic<int32_t> g_process{[] {
  pthread_atfork(nullptr, nullptr, [] { g_process.store(getpid()); });
  return getpid();
}()};

int32_t world_rank(const Control& c, int32_t role, int32_t role_rank) {
  return role == kAttention ? role_rank : static_cast<int32_t>(c.geometry.attention_size) + role_rank;
}

std::string rank_name(const Control& c, int32_t role, int32_t role_rank) {
  std::ostringstream s;
  s << "rank " << world_rank(c, role, role_rank) << " (" << (role == kAttention ? "attention " : "ffn ") << role_rank
    << ")";
  return s.str();
}

}  // namespace

const char* name(Kind kind) { return kKindNames[static_cast<int32_t>(kind)]; }
const char* name(Op op) { return kOpNames[static_cast<int32_t>(op)]; }
const char* name(Field field) { return kFieldNames[static_cast<int32_t>(field)]; }

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

int64_t publish(Control* control) {
  const int64_t id = g_next.fetch_add(1);
  if (id >= kMaxWindows) throw std::runtime_error("afd_ops: this process has opened 65535 windows, the most it can");
  g_windows[id].store(control, std::memory_order_release);
  return id;
}

void publish_as(int64_t window, Control* control) { g_windows[window].store(control, std::memory_order_release); }

Control* find(int64_t window) {
  return window > 0 && window < kMaxWindows ? g_windows[window].load(std::memory_order_acquire) : nullptr;
}

std::string describe(const Control& c, const ErrorRecord& r) {
  const int32_t other = c.role == kAttention ? kFfn : kAttention;
  std::ostringstream s;
  const std::string who = r.peer >= 0 ? rank_name(c, other, r.peer) : rank_name(c, c.role, c.role_rank);
  switch (static_cast<Kind>(r.kind)) {
    case Kind::Timeout:
      s << who << (c.role == kAttention ? " did not answer within " : " was not answered within ")
        << static_cast<double>(c.deadline_ns) * 1e-9 << " s";
      break;
    case Kind::PeerFailed:
      s << who
        << (r.seen == kGone ? "'s process ended without closing its window" : " failed and poisoned this window");
      break;
    case Kind::PeerLeft:
      s << who << " closed its window";
      break;
    case Kind::Protocol:
      s << who << " broke the protocol: " << name(static_cast<Field>(r.field)) << " is " << r.seen << ", expected "
        << r.expected;
      break;
    case Kind::Argument:
      if (static_cast<Field>(r.field) == Field::topk_ids)
        s << "topk_ids holds " << r.seen << ", expected -1 (no expert) or 0 to " << r.expected - 1;
      else if (static_cast<Op>(r.op) == Op::reply)
        s << "expert_out has " << r.expected << " rows, but the item has " << r.seen;
      else if (static_cast<Field>(r.field) == Field::rows)
        s << "rows is " << r.expected << ", but the item has " << r.seen << " rows";
      else
        s << "port was never filled; attach(window) fills it";
      break;
    case Kind::RingBusy:
      s << "stage " << r.stage << " has " << c.geometry.depth << " dispatches in flight (depth " << c.geometry.depth
        << "); combine the oldest first";
      break;
    case Kind::Stale:
      s << "ticket or item is not in flight: used before, of another lane, or from before a reset()";
      break;
    default:
      s << who << " gave up on this window";
  }
  s << " (op " << name(static_cast<Op>(r.op)) << ", layer " << r.layer << ", stage " << r.stage << ", ring " << r.ring
    << ", sequence " << r.sequence << ", generation " << r.generation << ")";
  return s.str();
}

void record(Control& c, ErrorRecord r) {
  ErrorRecord& slot = c.records[r.peer >= 0 ? r.peer : c.peers];
  int32_t expected = 0;
  if (!atomic(slot.claimed).compare_exchange_strong(expected, 1)) return;
  r.generation = c.generation;
  // The body alone: other threads look at `claimed` and `valid` meanwhile.
  constexpr size_t body = offsetof(ErrorRecord, kind);
  std::memcpy(&slot.kind, &r.kind, sizeof(ErrorRecord) - body);
  atomic(slot.valid).store(1, std::memory_order_release);
}

void poison_peer(Control& c, int32_t peer, int32_t sticky) {
  auto w = atomic(word(c.peer[peer], c.layout.sticky, c.role_rank));
  int32_t seen = w.load();
  while (seen < sticky && !w.compare_exchange_weak(seen, sticky)) {
  }
}

void fail(Control& c, const ErrorRecord& r) {
  record(c, r);
  int32_t expected = 0;
  atomic(c.failed).compare_exchange_strong(expected, 1 + (r.peer >= 0 ? r.peer : c.peers));
  for (int32_t p = 0; p < c.peers; ++p) poison_peer(c, p);
}

void stop(Control& c, const ErrorRecord& r) {
  fail(c, r);
  raise_failed(c, static_cast<Op>(r.op));
}

void close_region(Control& c, const ErrorRecord& r) {
  record(c, r);
  atomic(c.region[r.peer]).store(kPoisoned);
  for (int64_t i = 0; i < c.layout.slots_per_region; ++i) c.taken[r.peer * c.layout.slots_per_region + i].sequence = -1;
  poison_peer(c, r.peer);
}

const ErrorRecord& first_error(Control& c) {
  ErrorRecord& r = c.records[atomic(c.failed).load() - 1];
  while (atomic(r.valid).load(std::memory_order_acquire) == 0) {
    // another thread of this process is between its claim and its last store
  }
  return r;
}

void raise_failed(Control& c, Op op) {
  const ErrorRecord& r = first_error(c);
  raise(static_cast<Kind>(r.kind), op, describe(c, r));
}

Entry::Entry(int64_t window, Role role, Op op) : control_(find(window)) {
  if (control_ == nullptr)
    raise(Kind::Closed, op, "window ", window, " does not exist in this process; attach(window) first");
  atomic(control_->active).fetch_add(1);
  try {
    Control& c = *control_;
    if (c.owner != g_process.load(std::memory_order_relaxed))
      raise(Kind::Closed, op, "window ", window, " was opened by process ", c.owner, ", this is process ", getpid(),
            ": a forked process must open its own");
    if (atomic(c.closed).load() != 0) raise(Kind::Closed, op, "window ", window, " is closed");
    if (c.role != role)
      raise(Kind::Argument, op, "window ", window, " belongs to ", rank_name(c, c.role, c.role_rank),
            ", but this op is for ", role == kAttention ? "attention" : "ffn", " ranks");
    if (atomic(c.abort).load() != 0) raise(Kind::Aborted, op, "window ", window, " is being reset or closed");
    if (atomic(c.failed).load() != 0) raise_failed(c, op);
  } catch (...) {
    atomic(control_->active).fetch_sub(1);
    throw;
  }
}

Entry::~Entry() { atomic(control_->active).fetch_sub(1); }

}  // namespace afd
