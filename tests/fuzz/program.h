// program.h: what a byte string says: a geometry, and writes by which a broken peer changes words of the windows.
#pragma once

#include <iterator>
#include <limits>
#include <type_traits>

#include "cluster.h"

namespace afd::fuzz {

// What can be written, and what with. `minus_one` is NaN in a weight, a scale or a payload.
#define FUZZ_FIELDS(X) \
  X(magic)             \
  X(version)           \
  X(generation)        \
  X(layer)             \
  X(num_tokens)        \
  X(flags)             \
  X(sequence)          \
  X(routed)            \
  X(reserved)          \
  X(counts)            \
  X(expert)            \
  X(rank)              \
  X(weight)            \
  X(scale)             \
  X(payload)           \
  X(flag)              \
  X(sticky)

#define FUZZ_VALUES(X)                            \
  X(lowest)                                       \
  X(minus_one)                                    \
  X(zero)                                         \
  X(one)                                          \
  X(capacity)                                     \
  X(beyond) /* capacity + 1 */                    \
  X(highest)                                      \
  X(more) /* what stands there + 1 */             \
  X(less)                                         \
  X(flip)  /* bit `index` of what stands there */ \
  X(lap)   /* what stands there + depth */        \
  X(ready) /* the marker */                       \
  X(raw)   /* 4 bytes follow */

#define FUZZ_MOMENTS(X) X(arrive) X(receive) X(reply) X(combine)  // before that op
#define FUZZ_MODES(X) X(one_by_one) X(late) X(tight)

#define X(name) name,
enum class What : int32_t { FUZZ_FIELDS(X) };
enum class Value : int32_t { FUZZ_VALUES(X) };
enum class Moment : int32_t { FUZZ_MOMENTS(X) };
enum class Mode : int32_t { FUZZ_MODES(X) };
#undef X
#define X(name) #name,
constexpr const char* kFields[] = {FUZZ_FIELDS(X)};
constexpr const char* kValues[] = {FUZZ_VALUES(X)};
constexpr const char* kMoments[] = {FUZZ_MOMENTS(X)};
[[maybe_unused]] constexpr const char* kModes[] = {FUZZ_MODES(X)};
#undef X

class Program {
 public:
  Program(const uint8_t* data, size_t size) : data_(data), end_(data + size) {}
  bool more() const { return data_ != end_; }
  int32_t next(int64_t choices) { return static_cast<int32_t>(more() ? *data_++ % choices : 0); }
  int32_t word() {
    uint32_t w = 0;
    for (int i = 0; i < 4; ++i) w |= static_cast<uint32_t>(next(256)) << (8 * i);
    return static_cast<int32_t>(w);
  }

 private:
  const uint8_t *data_, *end_;
};

inline Geometry read_geometry(Program& p) {
  Geometry g{};
  g.attention_size = 1 + p.next(3);
  g.ffn_size = 1 + p.next(2);
  g.num_experts = 1 + p.next(5);
  g.stages = 1 + p.next(2);
  g.depth = 1 + p.next(3);
  g.layers = 2;
  g.tokens = 1 + p.next(4);
  g.topk = 1 + p.next(3);
  g.dtype = p.next(4);
  g.hidden = (1 + p.next(2)) * (wide_dtype(g.dtype) != g.dtype ? kScaleBlock : 16 / itemsize(g.dtype));
  return g;
}

struct Write {
  int32_t round, moment, side, rank, slot, field, index, value, raw;
};

inline Write read_write(Program& p) {
  Write w{};
  w.round = p.next(2);
  w.moment = p.next(std::size(kMoments));
  w.side = p.next(2);
  w.rank = p.next(256);
  w.slot = p.next(256);
  w.field = p.next(std::size(kFields));
  w.index = p.next(256);
  w.value = p.next(std::size(kValues));
  if (static_cast<Value>(w.value) == Value::raw) w.raw = p.word();
  return w;
}

template <typename T>
T value_of(const Write& w, T old, int64_t capacity, int64_t depth) {
  using U = std::make_unsigned_t<T>;
  const auto wrap = [](auto v) { return static_cast<T>(static_cast<U>(v)); };
  switch (static_cast<Value>(w.value)) {
    case Value::lowest:
      return std::numeric_limits<T>::min();
    case Value::minus_one:
      return -1;
    case Value::zero:
      return 0;
    case Value::one:
      return 1;
    case Value::capacity:
      return wrap(capacity);
    case Value::beyond:
      return wrap(capacity + 1);
    case Value::highest:
      return std::numeric_limits<T>::max();
    case Value::more:
      return wrap(static_cast<U>(old) + 1u);
    case Value::less:
      return wrap(static_cast<U>(old) - 1u);
    case Value::flip:
      return wrap(static_cast<U>(old) ^ (uint64_t{1} << (w.index % (8 * sizeof(T)))));
    case Value::lap:
      return wrap(static_cast<U>(old) + static_cast<U>(depth));
    case Value::ready:
      return wrap(kReady);
    case Value::raw:
      return wrap(w.raw);
  }
  return old;
}

// Changes the word; returns the A rank whose window, or region in an F window, now says something else, or -1.
inline int32_t carry_out(const Write& w, Cluster& cluster) {
  auto& side = w.side == 0 ? cluster.f : cluster.a;
  Control& c = side[w.rank % side.size()]->c;
  const Geometry& g = c.geometry;
  const int64_t index = w.slot % c.slots();
  const auto region = static_cast<int32_t>(index / c.layout.slots_per_region);
  const int64_t choice = w.index % (g.tokens * g.topk);
  const Slot slot(c.window, c.layout, index);
  SlotHeader& h = *slot.header;
  Position& position = slot.position[choice];
  const auto put = [&](auto& where, int64_t capacity) {
    using T = std::decay_t<decltype(where)>;
    T old;
    std::memcpy(&old, &where, sizeof(T));
    const T value = value_of(w, old, capacity, g.depth);
    std::memcpy(&where, &value, sizeof(T));
    return value != old ? (w.side == 0 ? region : c.role_rank) : -1;
  };
  const int64_t routed = g.tokens * g.topk;
  switch (static_cast<What>(w.field)) {
    case What::magic:
      return put(h.magic, g.tokens);
    case What::version:
      return put(h.version, g.tokens);
    case What::generation:
      return put(h.generation, g.tokens);
    case What::layer:
      return put(h.layer, g.layers);
    case What::num_tokens:
      return put(h.num_tokens, g.tokens);
    case What::flags:
      return put(h.flags, g.tokens);
    case What::sequence:
      return put(h.sequence, g.depth);
    case What::routed:
      return put(h.routed, routed);
    case What::reserved:
      return put(h.reserved, g.tokens);
    case What::counts:
      return put(slot.counts[w.index % g.local_experts], routed);
    case What::expert:
      return put(position.expert, g.local_experts);
    case What::rank: {
      const bool known = position.expert >= 0 && position.expert < g.local_experts;
      return put(position.rank, known ? slot.counts[position.expert] : routed);
    }
    case What::weight:
      return put(reinterpret_cast<int32_t*>(slot.weight)[choice], g.tokens);
    case What::scale:
      if (scales_per_row(g) == 0) return -1;
      return put(reinterpret_cast<int32_t*>(slot.scale)[w.index % (g.tokens * scales_per_row(g))], g.tokens);
    case What::payload: {
      const int64_t element = w.index % (g.tokens * g.hidden);
      const int64_t size = itemsize(c.role == kFfn ? g.dtype : wide_dtype(g.dtype));
      if (size == 1) return put(reinterpret_cast<int8_t*>(slot.payload)[element], g.tokens);
      if (size == 2) return put(reinterpret_cast<int16_t*>(slot.payload)[element], g.tokens);
      return put(reinterpret_cast<int32_t*>(slot.payload)[element], g.tokens);
    }
    case What::flag:
      return put(word(c.window, c.layout.flags, index), kReady);
    case What::sticky:
      return put(word(c.window, c.layout.sticky, region), kGone);
  }
  return -1;
}

}  // namespace afd::fuzz
