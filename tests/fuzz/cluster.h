// cluster.h: attention and FFN ranks for the drivers of this folder, in one process, without torch or Python.
//
// Each rank has the Control that csrc/module.cpp would have built and a window of exactly window_bytes() between two
// pages that may not be touched. Experts are expert-specific and payloads small integers, so every sum is exact.
#pragma once

#include <sys/mman.h>
#include <torch/headeronly/util/Float8_e4m3fn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "cpu/convert.h"
#include "cpu/kernels.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer) && !defined(__SANITIZE_ADDRESS__)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

namespace afd::fuzz {

constexpr int32_t kGeneration = 3;  // of every window here: a zeroed header is never right by chance
constexpr uint8_t kCanary = 0xA5;

// splitmix64: the same numbers wherever it runs.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  int32_t within(int32_t first, int32_t last) {
    return first + static_cast<int32_t>(next() % static_cast<uint64_t>(last - first + 1));
  }

 private:
  uint64_t state_;
};

// n bytes whose last one lies against a page that may not be touched; what page rounding leaves in front is poisoned.
class Guarded {
 public:
  explicit Guarded(int64_t n) : size_(n) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    inner_ = (n + page - 1) / page * page;
    void* p = mmap(nullptr, inner_ + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    begin_ = static_cast<char*>(p) + page;
    if (inner_ > 0 && mprotect(begin_, inner_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    ASAN_POISON_MEMORY_REGION(begin_, inner_ - size_);
  }
  ~Guarded() {
    const int64_t page = sysconf(_SC_PAGESIZE);
    ASAN_UNPOISON_MEMORY_REGION(begin_, inner_);
    munmap(begin_ - page, inner_ + 2 * page);
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  char* data() const { return begin_ + inner_ - size_; }
  int64_t size() const { return size_; }

 private:
  int64_t size_, inner_;
  char* begin_;
};

struct Interval {
  int64_t begin, end;
};

// The bytes of a window that no field covers, from the layout alone.
inline std::vector<Interval> gaps_of(const Control& c) {
  const Geometry& g = c.geometry;
  const Layout& l = c.layout;
  std::vector<Interval> fields;
  const auto field = [&fields](int64_t begin, int64_t size) { fields.push_back({begin, begin + size}); };
  for (int64_t i = 0; i < c.slots(); ++i) {
    field(l.flags + i * kWordStride, 4);
    const int64_t slot = l.slots + i * l.slot_bytes;
    field(slot, static_cast<int64_t>(sizeof(SlotHeader)) + 4 * g.local_experts);
    field(slot + l.position, g.tokens * g.topk * static_cast<int64_t>(sizeof(Position)));
    field(slot + l.weight, g.tokens * g.topk * 4);
    field(slot + l.scale, g.tokens * scales_per_row(g) * 4);
    field(slot + l.payload, g.tokens * wide_row(g));
  }
  for (int64_t p = 0; p < c.peers; ++p) field(l.sticky + p * kWordStride, 4);
  std::sort(fields.begin(), fields.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  std::vector<Interval> gaps;
  int64_t end = 0;
  for (const Interval& f : fields) {
    if (f.begin > end) gaps.push_back({end, f.begin});
    end = std::max(end, f.end);  // a field of no bytes begins where the next does
  }
  const int64_t bytes = window_bytes(l, c.peers);
  if (bytes > end) gaps.push_back({end, bytes});
  return gaps;
}

// One rank: its Control and everything a Control points to.
class Rank {
 public:
  Control c{};

  Rank(const Geometry& g, Role role, int32_t role_rank)
      : memory_(window_bytes(layout_of(g), role == kAttention ? g.ffn_size : g.attention_size)) {
    c.geometry = g;
    c.layout = layout_of(g);
    c.role = role;
    c.role_rank = role_rank;
    c.peers = static_cast<int32_t>(role == kAttention ? g.ffn_size : g.attention_size);
    c.generation = kGeneration;
    c.deadline_ns = 20'000'000'000;
    c.poll_ns = 0;
    c.rows = c.slots() * g.tokens * g.topk;
    c.window = memory_.data();

    c.peer = array(peer_, c.peers);
    c.expert_map = array(expert_map_, 2 * g.num_experts);
    c.experts_per_rank = array(experts_per_rank_, g.ffn_size);
    for (int32_t e = 0; e < g.num_experts; ++e) {
      c.expert_map[2 * e] = e / static_cast<int32_t>(g.local_experts);
      c.expert_map[2 * e + 1] = e % static_cast<int32_t>(g.local_experts);
      ++c.experts_per_rank[c.expert_map[2 * e]];
    }
    c.next = array(next_, g.stages);
    c.ring = array(ring_, g.stages * g.depth, int64_t{-1});
    c.taken = array(taken_, c.slots(), Taken{-1, 0, 0, 0, 0, 0});
    c.counts = array(counts_, c.slots() * g.local_experts);
    c.first = array(first_, c.slots() * g.local_experts);
    c.region = array(region_, c.peers, static_cast<int32_t>(kAlive));
    c.masked = array(masked_, c.peers);
    c.records = array(records_, c.peers + 1);
    c.bytes_sent = array(bytes_sent_, c.peers);
    c.slots_taken = array(slots_taken_, c.peers);
    c.rows_taken = array(rows_taken_, c.peers);

    // Zeroed as construction does; then NaN where nothing is valid before it was written, canaries in between.
    std::memset(c.window, 0, memory_.size());
    for (int64_t i = 0; i < c.slots(); ++i) {
      char* slot = c.window + c.layout.slots + i * c.layout.slot_bytes;
      std::memset(slot + c.layout.position, 0xFF, c.layout.slot_bytes - c.layout.position);
    }
    gaps_ = gaps_of(c);
    for (const Interval& gap : gaps_) {
      std::memset(c.window + gap.begin, kCanary, gap.end - gap.begin);
      ASAN_POISON_MEMORY_REGION(c.window + gap.begin, gap.end - gap.begin);
    }
  }

  int64_t bytes() const { return memory_.size(); }

  // The first byte of a canary that was overwritten, or -1. Ends the protection of the gaps.
  int64_t broken_canary() {
    for (const Interval& gap : gaps_) {
      ASAN_UNPOISON_MEMORY_REGION(c.window + gap.begin, gap.end - gap.begin);
      for (int64_t i = gap.begin; i < gap.end; ++i)
        if (static_cast<uint8_t>(c.window[i]) != kCanary) return i;
    }
    return -1;
  }

 private:
  // Of exact size, so that an index past the end is an access past an allocation.
  template <typename T>
  static T* array(std::unique_ptr<T[]>& owner, int64_t n, T value = T{}) {
    owner.reset(new T[n]);
    std::fill_n(owner.get(), n, value);
    return owner.get();
  }

  Guarded memory_;
  std::vector<Interval> gaps_;
  std::unique_ptr<char*[]> peer_;
  std::unique_ptr<int32_t[]> expert_map_, experts_per_rank_, counts_, first_, region_, masked_;
  std::unique_ptr<int64_t[]> next_, ring_, bytes_sent_, slots_taken_, rows_taken_;
  std::unique_ptr<Taken[]> taken_;
  std::unique_ptr<ErrorRecord[]> records_;
};

// All ranks of a geometry; experts lie in contiguous blocks of ceil(E / F), a late F rank may own none.
class Cluster {
 public:
  Geometry g;
  std::vector<std::unique_ptr<Rank>> a, f;

  explicit Cluster(Geometry geometry) : g(geometry) {
    g.local_experts = (g.num_experts + g.ffn_size - 1) / g.ffn_size;
    for (int32_t i = 0; i < g.attention_size; ++i) a.push_back(std::make_unique<Rank>(g, kAttention, i));
    for (int32_t j = 0; j < g.ffn_size; ++j) f.push_back(std::make_unique<Rank>(g, kFfn, j));
    for (auto& i : a)
      for (auto& j : f) {
        i->c.peer[j->c.role_rank] = j->c.window;
        j->c.peer[i->c.role_rank] = i->c.window;
      }
  }
};

inline float expert(int64_t index, float value) {
  return value * static_cast<float>(index % 3 + 1) + static_cast<float>(index);
}

// One element of a payload, a base or a result.
inline float load(int64_t type, const void* data, int64_t i) {
  if (type == k_float8_e4m3fn) return static_cast<const c10::Float8_e4m3fn*>(data)[i];
  float value = 0;
  visit(type, [&](auto v) { value = static_cast<float>(static_cast<const decltype(v)*>(data)[i]); });
  return value;
}

inline void store(int64_t type, void* data, int64_t i, float value) {
  visit(type, [&](auto v) { static_cast<decltype(v)*>(data)[i] = static_cast<decltype(v)>(value); });
}

inline float rounded(int64_t type, float value) {
  float stored = 0;  // room for any type
  store(type, &stored, 0, value);
  return load(type, &stored, 0);
}

// What an F rank computes between receive and reply: rows (and scales) to out, local expert by local expert.
inline void run_experts(const Control& c, const Item& item, const char* rows, const float* scales, char* out) {
  const Geometry& g = c.geometry;
  const int64_t wide = wide_dtype(g.dtype);
  std::vector<int32_t> offsets(c.local_experts());
  item_offsets(c, item, offsets.data());
  for (int64_t e = 0, i = 0; e < c.local_experts(); ++e)
    for (; i < offsets[e] * g.hidden; ++i) {
      const float scale = scales_per_row(g) > 0 ? scales[i / kScaleBlock] : 1.0f;
      store(wide, out, i, expert(c.role_rank * g.local_experts + e, load(g.dtype, rows, i) * scale));
    }
}

// One dispatch of an honest A rank with all its arguments, and its combine.
struct Step {
  Port port{};
  int32_t tokens = 0;
  DType base_type = k_float32;
  std::vector<int64_t> ids;
  std::vector<float> weights, x, base;
  std::vector<char> x_bytes, base_bytes, out;
  std::vector<int32_t> ticket;

  Step(const Geometry& g, Random& random, int32_t stage) {
    port = {random.within(0, 1), stage};
    tokens = random.within(0, 3) == 0 ? 0 : random.within(1, static_cast<int32_t>(g.tokens));
    base_type = random.within(0, 1) ? k_float32 : static_cast<DType>(wide_dtype(g.dtype));
    for (int64_t i = 0; i < tokens * g.topk; ++i) {
      ids.push_back(random.within(-1, static_cast<int32_t>(g.num_experts) - 1));
      weights.push_back(static_cast<float>(random.within(0, 2)));
    }
    for (int64_t i = 0; i < tokens * g.hidden; ++i) {
      // A block whose largest element is 7 is quantised by a power of two, without loss.
      x.push_back(static_cast<float>(scales_per_row(g) > 0 && i % kScaleBlock == 0 ? 7 : random.within(-3, 3)));
      base.push_back(static_cast<float>(random.within(-3, 3)));
    }
    x_bytes = bytes_of(x, wide_dtype(g.dtype));
    base_bytes = bytes_of(base, base_type);
  }

  void dispatch(Control& c) {
    const Geometry& g = c.geometry;
    ticket.assign((tokens + 1) * ticket_width(g.ffn_size), 0);
    afd::dispatch(c, port, {x_bytes.data(), tokens, g.hidden}, {ids.data(), true, g.topk, 1},
                  {weights.data(), g.topk, 1}, ticket.data());
  }

  void combine(Control& c) {
    out.assign(base_bytes.size(), static_cast<char>(0xFF));
    afd::combine(c, read_ticket(c, port, ticket.data(), tokens), masks(c.geometry), tokens,
                 {base_bytes.data(), tokens, c.geometry.hidden}, base_type, out.data());
  }

  const int32_t* masks(const Geometry& g) const { return ticket.data() + ticket_width(g.ffn_size); }

  // The naive MoE, from the arguments alone.
  std::vector<float> expected(const Geometry& g) const {
    std::vector<float> sum = base;
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t k = 0; k < g.topk; ++k)
        for (int64_t h = 0; ids[t * g.topk + k] >= 0 && h < g.hidden; ++h)
          sum[t * g.hidden + h] += weights[t * g.topk + k] * expert(ids[t * g.topk + k], x[t * g.hidden + h]);
    return sum;
  }

  bool exact(const Geometry& g) const { return out == bytes_of(expected(g), base_type); }

  static std::vector<char> bytes_of(const std::vector<float>& values, int64_t type) {
    std::vector<char> bytes(values.size() * itemsize(type));
    for (size_t i = 0; i < values.size(); ++i) store(type, bytes.data(), static_cast<int64_t>(i), values[i]);
    return bytes;
  }
};

}  // namespace afd::fuzz
