// peers.h: has a peer ended? Every op of an A rank asks before it writes and while it waits.
#pragma once

#include "../control.h"

namespace afd {

// A: stops the window (and raises) if any F rank poisoned it or closed its own. `r` says where this rank stands.
inline void check_peers(Control& c, ErrorRecord r) {
  for (int32_t f = 0; f < c.peers; ++f) {
    const int32_t sticky = atomic(word(c.window, c.layout.sticky, f)).load(std::memory_order_acquire);
    if (sticky == kAlive) continue;
    r.kind = static_cast<int32_t>(sticky == kLeft ? Kind::PeerLeft : Kind::PeerFailed);
    r.peer = f;
    stop(c, r);
  }
}

}  // namespace afd
