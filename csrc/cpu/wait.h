// wait.h: how a CPU op waits. Spin for a moment (the answer of a running peer takes microseconds), then give the core
// away (more ranks than cores must still make progress), then sleep (an idle F rank must not burn a core).
#pragma once

#include <sched.h>
#include <time.h>

#include "../control.h"

namespace afd {

// One turn of a spinning wait.
inline void spin() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

class Backoff {
 public:
  Backoff() : start_(now_ns()) {}

  // One step of waiting; returns the nanoseconds waited so far.
  int64_t pause() {
    if (++count_ < kSpins) {
      spin();
      return 0;
    }
    const int64_t waited = now_ns() - start_;
    if (waited < kYieldNs) {
      sched_yield();
    } else {
      const timespec nap{0, kNapNs};
      nanosleep(&nap, nullptr);
    }
    return waited;
  }

 private:
  static constexpr int kSpins = 128;
  static constexpr int64_t kYieldNs = 1'000'000;
  static constexpr long kNapNs = 50'000;
  int64_t start_;
  int count_ = 0;
};

}  // namespace afd
