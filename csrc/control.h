// control.h: what a rank keeps about one window, and how host code finds it.
//
// A Control is allocated once per window and never freed, so that an op that comes late finds `closed`, not garbage.
// An op's only protocol parameter is the window id; reset() changes the words in here, never an address.
#pragma once

#include <atomic>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

#include "wire.h"

namespace afd {

// F: a slot between arrive and reply. The header is checked once, by arrive; later ops trust this copy, not the wire.
struct Taken {
  int64_t sequence;  // -1: not taken
  int64_t at;        // ns
  int32_t layer;
  int32_t num_tokens;
  int32_t routed;
  int32_t reserved;
};

#define AFD_COUNTERS(X) X(dispatches) X(combines) X(items) X(replies) X(rows) X(tokens)

enum Counter : int32_t {
#define X(name) k_##name,
  AFD_COUNTERS(X)
#undef X
      kCounters
};

class Trips;  // trips.h

struct Control {
  Geometry geometry;
  Layout layout;
  int32_t role;
  int32_t role_rank;
  int32_t peers;       // ranks of the opposite role = regions of this window
  int32_t generation;  // bumped by reset()
  int32_t owner;       // process id
  int32_t on_device;   // the window lies in device memory: host code must not touch it
  int32_t closed;
  int32_t abort;   // set while reset() or close() drains: every wait ends
  int32_t failed;  // 0, or 1 + index into `records` of the error that stopped this window
  int32_t active;  // threads inside an op
  int64_t deadline_ns;
  int64_t poll_ns;
  int64_t rows;       // F: the most rows arrive puts in one item
  int64_t linger_ns;  // F: how long arrive waits for more once a slot is ready
  char* window;
  char** peer;                // [peers] base address of each peer's window
  int32_t* expert_map;        // [num_experts, 2]: F rank, local expert
  int32_t* experts_per_rank;  // [ffn_size]
  int64_t* next;              // A [stages]: sequence of the next dispatch
  int64_t* ring;              // A [stages, depth]: sequence in flight, or -1
  Taken* taken;               // F [slots]
  int32_t* counts;            // F [slots, local_experts], of taken slots
  int32_t* first;             // F [slots, local_experts]: row of a taken slot's first choice of that expert in its item
  int32_t cursor;             // F: where the next arrive begins: round x peers + region
  int32_t reserved;
  int32_t* region;       // [peers] Sticky, as this rank has acted on it
  int32_t* masked;       // A [peers]: this F rank is left out; nobody waits for it
  ErrorRecord* records;  // [peers + 1]
  int64_t* bytes_sent;   // [peers]
  int64_t* slots_taken;  // F [peers]
  int64_t* rows_taken;   // F [peers]
  int64_t counters[kCounters];
  Trips* trips;         // the host's, of whatever device
  int64_t arena_bytes;  // of the one allocation that begins with this Control and holds all its arrays

  AFD_HD int64_t slots() const { return peers * layout.slots_per_region; }
  AFD_HD int64_t slot(int64_t region, int64_t stage, int64_t ring) const {
    return (region * geometry.stages + stage) * geometry.depth + ring;
  }
  AFD_HD int32_t local_experts() const { return role == kFfn ? experts_per_rank[role_rank] : 0; }
};

inline int32_t& word(char* window, int64_t offset, int64_t index) {
  return *reinterpret_cast<int32_t*>(window + offset + index * kWordStride);
}

// A slot seen from either side: `window` is the receiver's.
struct Slot {
  SlotHeader* header;
  int32_t* counts;
  Position* position;
  float* weight;
  float* scale;
  char* payload;

  AFD_HD Slot(char* window, const Layout& l, int64_t index) {
    char* base = window + l.slots + index * l.slot_bytes;
    header = reinterpret_cast<SlotHeader*>(base);
    counts = reinterpret_cast<int32_t*>(base + sizeof(SlotHeader));
    position = reinterpret_cast<Position*>(base + l.position);
    weight = reinterpret_cast<float*>(base + l.weight);
    scale = reinterpret_cast<float*>(base + l.scale);
    payload = base + l.payload;
  }
};

// sequence mod depth; a 64-bit division takes a GPU as long as a load.
AFD_HD inline int64_t ring_of(const Geometry& g, int64_t sequence) {
  return (g.depth & (g.depth - 1)) == 0 ? sequence & (g.depth - 1) : sequence % g.depth;
}

template <typename T>
std::atomic_ref<T> atomic(T& v) {
  static_assert(std::atomic_ref<T>::is_always_lock_free);  // a lock would not be shared between processes
  return std::atomic_ref<T>(v);
}

inline std::atomic_ref<int32_t> flag(char* window, const Layout& l, int64_t slot) {
  return atomic(word(window, l.flags, slot));
}

inline void count(int64_t& counter, int64_t n) { atomic(counter).fetch_add(n, std::memory_order_relaxed); }

const char* name(Kind kind);
const char* name(Op op);
const char* name(Field field);

// Every error of an op starts "Kind in afd::op: "; errors.py turns that into an exception class.
template <typename... Args>
[[noreturn]] void raise(Kind kind, Op op, const Args&... args) {
  std::ostringstream s;
  s << name(kind) << " in afd::" << name(op) << ": ";
  ((s << args), ...);
  throw std::runtime_error(s.str());
}

int64_t now_ns();

// The windows of this process by id. Ids start at 1, are never reused, and outlive close().
int64_t publish(Control* control);
void publish_as(int64_t window, Control* control);  // in the CUDA half, under the id it has in the other
Control* find(int64_t window);                      // nullptr if there never was one

// Error records. `where` says at which point of the protocol; the caller adds kind and peer (role rank, -1: itself).
AFD_HD inline ErrorRecord where(Op op, int32_t layer, int32_t stage, int64_t ring, int64_t sequence) {
  ErrorRecord r{};
  r.op = static_cast<int32_t>(op);
  r.layer = layer;
  r.peer = -1;
  r.stage = stage;
  r.ring = static_cast<int32_t>(ring);
  r.sequence = sequence;
  return r;
}
// Names the word that is wrong.
AFD_HD inline void name_word(ErrorRecord& r, Field field, int64_t expected, int64_t seen) {
  r.field = static_cast<int32_t>(field);
  r.expected = expected;
  r.seen = seen;
}
// Tells `fails(bad, field, expected, seen)` what the protocol asks of a header, until it returns true; returns that.
template <typename Fails>
AFD_HD inline bool header_fails(const Geometry& g, const SlotHeader& h, int32_t generation, int32_t ring,
                                const Fails& fails) {
  const int64_t of_sequence = ring_of(g, h.sequence);
  return fails(h.magic != kHeaderMagic, Field::magic, kHeaderMagic, h.magic) ||
         fails(h.version != kWireVersion, Field::version, kWireVersion, h.version) ||
         fails(h.generation != generation, Field::generation, generation, h.generation) ||
         fails(h.flags != 0, Field::flags, 0, h.flags) || fails(h.sequence < 0, Field::sequence, 0, h.sequence) ||
         fails(of_sequence != ring, Field::ring, ring, of_sequence) ||
         fails(h.layer < 0 || h.layer >= g.layers, Field::layer, g.layers - 1, h.layer) ||
         fails(h.num_tokens < 0 || h.num_tokens > g.tokens, Field::num_tokens, g.tokens, h.num_tokens);
}
// The same of a reply's, which must be the answer to a ticket.
template <typename Ticket, typename Fails>
AFD_HD inline bool reply_header_fails(const Ticket& k, int64_t tokens, const SlotHeader& h, const Fails& fails) {
  return fails(h.magic != kHeaderMagic, Field::magic, kHeaderMagic, h.magic) ||
         fails(h.version != kWireVersion, Field::version, kWireVersion, h.version) ||
         fails(h.generation != k.generation, Field::generation, k.generation, h.generation) ||
         fails(h.sequence != k.sequence, Field::sequence, k.sequence, h.sequence) ||
         fails(h.layer != k.layer, Field::layer, k.layer, h.layer) || fails(h.flags != 0, Field::flags, 0, h.flags) ||
         fails(h.num_tokens != tokens, Field::num_tokens, tokens, h.num_tokens);
}
// A flag word that is neither EMPTY nor READY.
AFD_HD inline ErrorRecord bad_flag(ErrorRecord r, int32_t peer, int32_t seen) {
  r.kind = static_cast<int32_t>(Kind::Protocol);
  r.peer = peer;
  name_word(r, Field::flags, kReady, seen);
  return r;
}

// The peer that ended, by its sticky word.
AFD_HD inline ErrorRecord ended(ErrorRecord r, int32_t peer, int32_t sticky) {
  r.kind = static_cast<int32_t>(sticky == kLeft ? Kind::PeerLeft : Kind::PeerFailed);
  r.peer = peer;
  r.seen = sticky;
  return r;
}

std::string describe(const Control& c, const ErrorRecord& r);
void record(Control& c, ErrorRecord r);
void poison_peer(Control& c, int32_t peer, int32_t sticky = kPoisoned);
// Stop this window: record, poison every peer, raise. The first error of a window is the one that is reported.
[[noreturn]] void stop(Control& c, const ErrorRecord& r);
void fail(Control& c, const ErrorRecord& r);
// F: close one region and tell its owner; the others are served on.
void close_region(Control& c, const ErrorRecord& r);
// The record of the error that stopped this window; call only when `failed` is set.
const ErrorRecord& first_error(Control& c);
[[noreturn]] void raise_failed(Control& c, Op op);

// An op's stay inside a window: refuses an unknown, closed, failed or wrong-role one; close() and reset() wait for it.
class Entry {
 public:
  Entry(int64_t window, Role role, Op op);
  ~Entry();
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
  Control& control() const { return *control_; }

 private:
  Control* control_;
};

}  // namespace afd
