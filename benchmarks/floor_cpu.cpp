// What round_trip_cpu.py compares with: two copies of the payload, a cache line's way between two CPUs, and the floor
// of a round trip on one CPU thread: the bytes that have to move, and no protocol.
//   put          x -> slot, T rows
//   gather       slot -> rows in expert order, T x topk rows
//   sum and put  rows -> reply, T rows: each the float32 weighted sum of topk rows, rounded once where it lands
// Where each choice goes is computed beforehand; nothing is allocated, checked or waited for. Slots and replies
// alternate between two buffers, as the rings of a window do, and each iteration puts what the one before answered.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

float widen(uint16_t v) { return std::bit_cast<float>(static_cast<uint32_t>(v) << 16); }

// Round to nearest even; the benchmark has no NaN.
uint16_t narrow(float v) {
  const auto u = std::bit_cast<uint32_t>(v);
  return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// As wide as the machine is; plain loops otherwise.
#if defined(__x86_64__)
#define WIDEST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WIDEST
#endif

// Two rows a pass, which halves the traffic of the sums; more gains nothing.
WIDEST void accumulate(float* __restrict acc, const uint16_t* __restrict a, const uint16_t* __restrict b,
                       float weight_a, float weight_b, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] = acc[i] + weight_a * widen(a[i]) + weight_b * widen(b[i]);
}

WIDEST void round(uint16_t* __restrict out, const float* __restrict acc, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = narrow(acc[i]);
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

// Nanoseconds of `iterations` chained round trips over bfloat16 rows; topk is even. slots and replies are
// [2, tokens, hidden], rows [tokens x topk, hidden]; position and weight are [tokens, topk].
extern "C" int64_t floor_ns(int64_t iterations, int64_t tokens, int64_t hidden, int64_t topk, const uint16_t* x,
                            uint16_t* slots, uint16_t* rows, uint16_t* replies, const int32_t* position,
                            const float* weight) {
  const int64_t payload = tokens * hidden;
  const size_t row_bytes = hidden * sizeof(uint16_t);
  std::vector<float> acc(hidden);
  const int64_t start = now_ns();
  for (int64_t i = 0; i < iterations; ++i) {
    uint16_t* slot = slots + i % 2 * payload;
    uint16_t* reply = replies + i % 2 * payload;
    std::memcpy(slot, x, payload * sizeof(uint16_t));
    for (int64_t n = 0; n < tokens * topk; ++n)
      std::memcpy(rows + position[n] * hidden, slot + n / topk * hidden, row_bytes);
    for (int64_t t = 0; t < tokens; ++t) {
      std::fill(acc.begin(), acc.end(), 0.0f);
      for (int64_t n = t * topk; n < (t + 1) * topk; n += 2)
        accumulate(acc.data(), rows + position[n] * hidden, rows + position[n + 1] * hidden, weight[n], weight[n + 1],
                   hidden);
      round(reply + t * hidden, acc.data(), hidden);
    }
    x = reply;
  }
  return now_ns() - start;
}

// Nanoseconds of `iterations` times two copies of the payload: x to a slot and that slot to a reply.
extern "C" int64_t two_memcpy_ns(int64_t iterations, int64_t tokens, int64_t hidden, const uint16_t* x, uint16_t* slots,
                                 uint16_t* replies) {
  const int64_t payload = tokens * hidden;
  const int64_t start = now_ns();
  for (int64_t i = 0; i < iterations; ++i) {
    uint16_t* slot = slots + i % 2 * payload;
    uint16_t* reply = replies + i % 2 * payload;
    std::memcpy(slot, x, payload * sizeof(uint16_t));
    std::memcpy(reply, slot, payload * sizeof(uint16_t));
    x = reply;
  }
  return now_ns() - start;
}

// Nanoseconds of `iterations` ways of a cache line from one CPU to another and back: what tells a shared L3 cache from
// two. 0 if a thread could not be pinned.
extern "C" int64_t handoff_ns(int64_t iterations, int64_t here, int64_t there) {
  alignas(128) std::atomic<int64_t> word{0};
  std::atomic<bool> together{true};
  const auto pinned = [&together](int64_t cpu, auto turn) {
    return std::thread([&together, cpu, turn] {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(static_cast<size_t>(cpu), &set);
      if (pthread_setaffinity_np(pthread_self(), sizeof set, &set) != 0) together = false;
      turn();
    });
  };
  const auto wait_for = [&word](int64_t value) {
    while (word.load(std::memory_order_acquire) != value) {
    }
  };
  int64_t took = 0;
  std::thread a = pinned(here, [&] {
    wait_for(1);
    const int64_t start = now_ns();
    for (int64_t i = 1; i < 2 * iterations; i += 2) {
      word.store(i + 1, std::memory_order_release);
      wait_for(i + 2);
    }
    took = now_ns() - start;
  });
  std::thread b = pinned(there, [&] {
    word.store(1, std::memory_order_release);
    for (int64_t i = 2; i <= 2 * iterations; i += 2) {
      wait_for(i);
      word.store(i + 1, std::memory_order_release);
    }
  });
  a.join();
  b.join();
  return together ? took : 0;
}
