// peers.h: has a peer ended? An A rank asks before it writes and while it waits.
#pragma once

#include "../control.h"

namespace afd {

// A: stops the window (and raises) if an F rank that is not masked has ended. `r` says where this rank stands.
inline void check_peers(Control& c, ErrorRecord r) {
  for (int32_t f = 0; f < c.peers; ++f) {
    const int32_t sticky = atomic(word(c.window, c.layout.sticky, f)).load(std::memory_order_acquire);
    if (sticky == kAlive || atomic(c.masked[f]).load() != 0) continue;
    stop(c, ended(r, f, sticky));
  }
}

}  // namespace afd
