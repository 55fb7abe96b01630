// shadow.h: a copy of every window, and which bytes may differ from it: what a step may have written. Whatever is not
// as it should be ends the process, saying in which step of which program.
#pragma once

#include <cstdio>
#include <string>

#include "cluster.h"

namespace afd::fuzz {

inline std::string step_name, program_hex;

inline void say_where() {
  std::fprintf(stderr, "hostile: in %s of program %s\n", step_name.c_str(), program_hex.c_str());
}

[[noreturn]] inline void give_up(const std::string& why) {
  std::fprintf(stderr, "hostile: %s\n", why.c_str());
  say_where();
  std::abort();
}

inline std::string text(const std::string& s) { return s; }
inline std::string text(const char* s) { return s; }
inline std::string text(char s) { return std::string(1, s); }
template <typename T>
std::string text(T n) {
  return std::to_string(n);
}

template <typename... Args>
[[noreturn, gnu::noinline, gnu::cold]] void wrong(const Args&... args) {
  give_up((text(args) + ...));
}

inline int32_t flag_of(const Control& c, int64_t slot) { return word(c.window, c.layout.flags, slot); }
inline int32_t sticky_of(const Control& c, int32_t peer) { return word(c.window, c.layout.sticky, peer); }

class Shadow {
 public:
  explicit Shadow(const Cluster& cluster) : cluster_(cluster) {
    for (auto& a : cluster.a) then_.emplace_back(a->bytes() / 8);
    for (auto& f : cluster.f) then_.emplace_back(f->bytes() / 8);
  }

  size_t world(const Control& c) const { return (c.role == kAttention ? 0 : cluster_.a.size()) + c.role_rank; }

  // Reads every byte, gaps too: not for ASan's eyes.
  __attribute__((no_sanitize("address"))) void remember() {
    allowed_.clear();
    for (size_t r = 0; r < then_.size(); ++r) {
      const auto* now = reinterpret_cast<const volatile uint64_t*>(rank(r).c.window);
      uint64_t* then = then_[r].data();
      for (size_t i = 0, n = then_[r].size(); i < n; ++i) then[i] = now[i];
    }
  }

  __attribute__((no_sanitize("address"))) void check() {
    for (size_t r = 0; r < then_.size(); ++r) {
      const auto* now = reinterpret_cast<const volatile uint64_t*>(rank(r).c.window);
      const uint64_t* then = then_[r].data();
      for (size_t i = 0, n = then_[r].size(); i < n; ++i) {
        uint64_t changed = now[i] ^ then[i];
        for (int64_t byte = static_cast<int64_t>(8 * i); changed != 0; ++byte, changed >>= 8)
          if ((changed & 0xFF) != 0 && !allowed(r, byte))
            wrong("byte ", byte, " of world rank ", r, "'s window changed");
      }
    }
    remember();
  }

  void allow(const Control& c, const void* begin, int64_t size) {
    const int64_t at = static_cast<const char*>(begin) - c.window;
    allowed_.push_back({world(c), {at, at + size}});
  }
  void allow_flag(const Control& c, int64_t slot) { allow(c, &word(c.window, c.layout.flags, slot), 4); }
  void allow_sticky(const Control& c, int32_t peer) { allow(c, &word(c.window, c.layout.sticky, peer), 4); }

  // A poison of `by` must have reached c: a larger word stays.
  void poisoned(const Control& c, const Control& by) {
    const int64_t at = c.layout.sticky + by.role_rank * kWordStride;
    const int32_t before = low(static_cast<int64_t>(then_[world(c)][at / 8]));
    if (sticky_of(c, by.role_rank) != std::max<int32_t>(before, kPoisoned))
      wrong("sticky word ", by.role_rank, " of world rank ", world(c), " is ", sticky_of(c, by.role_rank), ", was ",
            before);
  }

 private:
  Rank& rank(size_t world) const {
    return world < cluster_.a.size() ? *cluster_.a[world] : *cluster_.f[world - cluster_.a.size()];
  }

  bool allowed(size_t r, int64_t byte) const {
    for (const auto& [world, interval] : allowed_)
      if (world == r && interval.begin <= byte && byte < interval.end) return true;
    return false;
  }

  const Cluster& cluster_;
  std::vector<std::vector<uint64_t>> then_;
  std::vector<std::pair<size_t, Interval>> allowed_;
};

}  // namespace afd::fuzz
