// adversary: a peer that writes while we read. What was checked must be what is used.
//
// Link this with the library's objects built with -fsanitize=thread, but without TSan's runtime: the functions that the
// compiler calls before every access are defined here, and one of them, the n-th within what the attacked peer can
// write, overwrites one word first. Every access of every op x every word x every value is tried, so that a value read
// twice, once to check it and once to use it, shows every time and not once in a million. The payload is copied by
// memcpy, which is not seen here; its content has no meaning to the protocol.
//
// Checked: no access outside (guard pages, canaries), F never raises, what F takes is well formed, and the other A rank
// is answered exactly. One line per op: accesses and attacks.
#include <cstdio>
#include <iterator>
#include <limits>
#include <string>

#include "cluster.h"

namespace afd::fuzz {
namespace {

struct Attack {
  const char* begin = nullptr;  // accesses in [begin, end) are counted
  const char* end = nullptr;
  int64_t until = -1;  // accesses to go before `word` becomes `value`
  int64_t seen = 0;
  int32_t* word = nullptr;
  int32_t value = 0;
} attack;

std::string description;  // of what is tried, for whoever reads the failure

void on_access(const volatile void* address) {
  const auto* p = static_cast<const char*>(const_cast<const void*>(address));
  if (p < attack.begin || p >= attack.end) return;
  if (attack.seen++ == attack.until) *attack.word = attack.value;
}

}  // namespace
}  // namespace afd::fuzz

// The compiler's side of TSan (GCC and clang agree on it), as far as the kernels use it.
#define ACCESS(name) \
  void __tsan_##name(void* p) { afd::fuzz::on_access(p); }
#define ACCESSES(bytes)         \
  ACCESS(read##bytes)           \
  ACCESS(write##bytes)          \
  ACCESS(unaligned_read##bytes) \
  ACCESS(unaligned_write##bytes)
#define ATOMICS(bits, T)                                                                    \
  T __tsan_atomic##bits##_load(const volatile T* p, int) {                                  \
    afd::fuzz::on_access(p);                                                                \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                            \
  }                                                                                         \
  void __tsan_atomic##bits##_store(volatile T* p, T v, int) {                               \
    afd::fuzz::on_access(p);                                                                \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                               \
  }                                                                                         \
  T __tsan_atomic##bits##_fetch_add(volatile T* p, T v, int) {                              \
    afd::fuzz::on_access(p);                                                                \
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                                      \
  }                                                                                         \
  T __tsan_atomic##bits##_fetch_sub(volatile T* p, T v, int) {                              \
    afd::fuzz::on_access(p);                                                                \
    return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST);                                      \
  }                                                                                         \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile T* p, T* e, T v, int, int) {   \
    afd::fuzz::on_access(p);                                                                \
    return __atomic_compare_exchange_n(p, e, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }                                                                                         \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile T* p, T* e, T v, int, int) {     \
    afd::fuzz::on_access(p);                                                                \
    return __atomic_compare_exchange_n(p, e, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* p, unsigned long) { afd::fuzz::on_access(p); }
void __tsan_write_range(void* p, unsigned long) { afd::fuzz::on_access(p); }
ATOMICS(32, int)
ATOMICS(64, long)
}

namespace afd::fuzz {
namespace {

[[noreturn]] void wrong(const std::string& why) {
  std::fprintf(stderr, "hostile: %s, when %s\n", why.c_str(), description.c_str());
  std::abort();
}

constexpr Op kOps[] = {Op::dispatch, Op::arrive, Op::receive, Op::reply, Op::combine};

struct Plan {
  Op op;
  int64_t access = -1;  // -1: only count
  int32_t word = 0, value = 0;
};

// One round trip of two A ranks with one F rank; the first A rank's slots are under attack during `plan.op`.
class RoundTrip {
 public:
  explicit RoundTrip(const Plan& plan)
      : plan_(plan), random_(4), cluster_({2, 1, 2, 0, 1, 2, 3, 2, 4, k_float32, 2}), f_(*cluster_.f[0]) {
    for (auto& a : cluster_.a) {
      a->c.deadline_ns = 0;
      do {
        step_.emplace_back(cluster_.g, random_, 0);
        if (step_.back().tokens < 2) step_.pop_back();
      } while (step_.size() <= static_cast<size_t>(a->c.role_rank));
    }
    Control& c = plan.op == Op::combine ? cluster_.a[0]->c : f_.c;
    words_ = words_of(c);
  }

  int32_t words() const { return static_cast<int32_t>(words_.size()); }

  // Returns the accesses that the attack could have chosen from.
  int64_t operator()() {
    attacked(Op::dispatch, [&] { step_[0].dispatch(cluster_.a[0]->c); });
    step_[1].dispatch(cluster_.a[1]->c);
    for (int items = 0; serve(); ++items)
      if (items > 4) wrong("arrive finds no end");
    const bool stopped = attacked(Op::combine, [&] { step_[0].combine(cluster_.a[0]->c); });
    if (stopped && cluster_.a[0]->c.failed == 0) wrong("combine raised without a record");
    if (!stopped && plan_.op == Op::combine && !step_[0].exact(cluster_.g)) wrong("combine is wrong");
    step_[1].combine(cluster_.a[1]->c);
    if (!step_[1].exact(cluster_.g)) wrong("the other attention rank got a wrong sum");
    if (f_.c.region[1] != kAlive || f_.c.records[1].claimed != 0) wrong("the other region was closed");
    for (auto* side : {&cluster_.a, &cluster_.f})
      for (auto& rank : *side)
        if (rank->broken_canary() >= 0) wrong("a canary is gone");
    return seen_;
  }

 private:
  // What the peer of region 0 can write: header, counts and positions of its first slot, its flag and its sticky word.
  std::vector<int32_t*> words_of(const Control& c) {
    const Slot slot(c.window, c.layout, 0);
    std::vector<int32_t*> words{&word(c.window, c.layout.flags, 0), &word(c.window, c.layout.sticky, 0)};
    auto* header = reinterpret_cast<int32_t*>(slot.header);
    for (size_t i = 0; i < sizeof(SlotHeader) / 4 + cluster_.g.local_experts; ++i) words.push_back(header + i);
    for (int64_t n = 0; c.role == kFfn && n < cluster_.g.tokens * cluster_.g.topk; ++n) {
      words.push_back(&slot.position[n].expert);
      words.push_back(&slot.position[n].rank);
    }
    return words;
  }

  template <typename Call>
  bool attacked(Op op, Call&& call) {
    if (op != plan_.op) return raised(op, call);
    Rank& rank = op == Op::combine ? *cluster_.a[0] : f_;
    attack = {};
    attack.until = plan_.access;
    attack.word = words_[plan_.word];
    attack.value = plan_.value;
    attack.begin = rank.c.window;
    attack.end = rank.c.window + rank.bytes();
    const bool did = raised(op, call);
    attack.end = attack.begin;
    seen_ += attack.seen;
    plan_.access -= attack.seen;  // an op that is called again is attacked on
    return did;
  }

  template <typename Call>
  bool raised(Op op, Call&& call) {
    try {
      call();
      return false;
    } catch (const std::runtime_error& e) {
      if (op != Op::combine) wrong(e.what());
      return true;
    }
  }

  bool serve() {
    Control& c = f_.c;
    const Geometry& g = c.geometry;
    std::vector<int32_t> words((1 + c.slots()) * kItemWords, 0);
    attacked(Op::arrive, [&] { arrive(c, words.data()); });
    if (words[kItemCount] == 0) return false;
    int64_t rows = 0;
    for (int32_t i = 0; i < words[kItemCount]; ++i)
      rows += check_taken(words.data(), words.data() + (1 + i) * kItemWords);
    if (rows != words[kItemRows]) wrong("the item's rows are not those of its slots");
    const Guarded in(rows * g.hidden * 4), out(rows * g.hidden * 4);
    std::memset(in.data(), 0, in.size());
    attacked(Op::receive, [&] {
      Item item = read_item(c, Op::receive, words.data());
      receive(c, item, in.data(), nullptr);
      run_experts(c, item, in.data(), nullptr, out.data());
    });
    attacked(Op::reply, [&] {
      Item item = read_item(c, Op::reply, words.data());
      reply(c, item, {out.data(), rows, g.hidden});
    });
    return true;
  }

  // A slot of an item is well formed by what F keeps of it, whatever its header says by now.
  int64_t check_taken(const int32_t* item, const int32_t* s) {
    const Control& c = f_.c;
    const Geometry& g = c.geometry;
    const int64_t index = c.slot(s[kItemRegion], s[kItemStage], s[kItemRing]);
    const int64_t sequence = join(s[kItemSequenceLow], s[kItemSequenceHigh]);
    const Taken& taken = c.taken[index];
    int64_t sum = 0;
    for (int64_t e = 0; e < g.local_experts; ++e) {
      if (c.counts[index * g.local_experts + e] < 0) wrong("a count below 0 was taken");
      sum += c.counts[index * g.local_experts + e];
    }
    if (c.region[s[kItemRegion]] == kAlive && taken.sequence != sequence) wrong("another sequence was taken");
    if (sequence < 0 || sequence % g.depth != s[kItemRing]) wrong("a sequence of another ring was taken");
    if (item[kItemLayer] < 0 || taken.layer != item[kItemLayer]) wrong("another layer was taken");
    if (s[kItemTokens] < 0 || s[kItemTokens] > g.tokens || taken.num_tokens != s[kItemTokens])
      wrong("another num_tokens was taken");
    if (sum != s[kItemRouted] || taken.routed != sum || sum > s[kItemTokens] * g.topk) wrong("other counts were taken");
    return sum;
  }

  Plan plan_;
  Random random_;
  Cluster cluster_;
  Rank& f_;
  std::vector<Step> step_;
  std::vector<int32_t*> words_;
  int64_t seen_ = 0;
};

void attack_all(Op op) {
  constexpr int32_t most = std::numeric_limits<int32_t>::max();
  const int32_t values[] = {std::numeric_limits<int32_t>::min(), -1, 0, 1, 2, most, kReady};
  description = "nobody attacks";
  RoundTrip quiet({op});
  const int64_t accesses = quiet();
  const int32_t words = quiet.words();
  for (int64_t access = 0; access < accesses; ++access)
    for (int32_t word = 0; word < words; ++word)
      for (const int32_t value : values) {
        description = std::string("before access ") + std::to_string(access) + " of " + name(op) + " word " +
                      std::to_string(word) + " becomes " + std::to_string(value);
        RoundTrip({op, access, word, value})();
      }
  std::printf("%s %lld accesses %lld attacks\n", name(op), static_cast<long long>(accesses),
              static_cast<long long>(accesses * words * std::size(values)));
  std::fflush(stdout);
}

}  // namespace
}  // namespace afd::fuzz

int main() {
  for (const afd::Op op : afd::fuzz::kOps) afd::fuzz::attack_all(op);
  return 0;
}
