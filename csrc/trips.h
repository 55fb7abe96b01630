// trips.h: the round trips that a window's host has begun and not ended. The rings say that too, but not whose they
// are, and a device's are not asked.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <thread>
#include <unordered_map>

namespace afd {

// By the address of the port that dispatch and combine share. Never freed, like its window.
class Trips {
 public:
  void dispatched(const void* port) {
    const std::lock_guard lock(mutex_);
    Lane& lane = lanes_[port];
    lane = {lane.open + 1, ++clock_, std::this_thread::get_id()};
  }
  void combined(const void* port) {
    const std::lock_guard lock(mutex_);
    Lane& lane = lanes_[port];
    if (lane.open > 0) --lane.open;  // a device finds only later that a ticket was none
  }
  void clear() {
    const std::lock_guard lock(mutex_);
    lanes_.clear();
  }
  // How many dispatches there were.
  int64_t clock() {
    const std::lock_guard lock(mutex_);
    return clock_;
  }
  int64_t open() {
    const std::lock_guard lock(mutex_);
    int64_t n = 0;
    for (const auto& [port, lane] : lanes_) n += lane.open;
    return n;
  }
  // Whether the calling thread has, since clock() was `since`, dispatched through a port that waits for a combine.
  bool owed_since(int64_t since) {
    const std::lock_guard lock(mutex_);
    return std::any_of(lanes_.begin(), lanes_.end(), [since](const auto& entry) {
      const Lane& lane = entry.second;
      return lane.open > 0 && lane.last > since && lane.by == std::this_thread::get_id();
    });
  }

 private:
  struct Lane {
    int64_t open = 0, last = 0;  // dispatches without their combine; when the last of them was
    std::thread::id by;
  };
  std::mutex mutex_;
  int64_t clock_ = 0;
  std::unordered_map<const void*, Lane> lanes_;
};

}  // namespace afd
