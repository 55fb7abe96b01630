// host.h: the host's side of a window in device memory.
#pragma once

#include <vector>

#include "device.cuh"
#include "kernels.h"

namespace afd {

constexpr int64_t kBusyNs = 1'000'000'000;  // an FFN rank that had an item this long ago is not idle
constexpr uint32_t kSpinsPerYield = 512;    // of one that is not

// How often a host that waits for an item launches the graph of a kernel that does nothing: when the driver's code and
// data have left the CPU's caches, the launch of the experts' graph takes twice as long and more.
constexpr int64_t kRehearseNs = 30'000;

// Which of a table's graphs is likely to be next: the one that came after the last one the last time. A model's layers
// follow each other.
struct Succession {
  std::vector<int32_t> after;  // by place in the table; -1: not known
  int32_t last = -1;
  void add(int32_t graph, size_t graphs) {
    if (after.size() != graphs) after.assign(graphs, -1), last = -1;
    if (last >= 0) after[last] = graph;
    last = graph;
  }
  // -1 if that is not known, or the last one itself.
  int32_t next(size_t graphs) const {
    return last < 0 || after.size() != graphs || after[last] == last ? -1 : after[last];
  }
};

struct DeviceWindow {
  int device = -1;
  uint32_t tag = 0;               // of the last item that a server asked for; 0 if nothing begins early
  DeviceControl control{};        // what kernels are launched with
  cudaStream_t stream = nullptr;  // the host's own words go here, beside whatever waits
  cudaGraphExec_t rehearsal = nullptr;
  int64_t rehearsals = 0;        // launched
  int64_t* rehearsed = nullptr;  // mapped: how many of them have run; they must not pile up behind a busy GPU
  Succession succession;         // of the experts' graphs
  int64_t expected = 0;          // sequence of the last item that the host has read from the mailbox
  int64_t last_item = 0;         // when that was, ns; empty ones do not count
};

// The device half of a window that `adopt` has built. Raises if there is none.
DeviceWindow& device_window(int64_t window);

}  // namespace afd
