// Ids and masks as both plan and dispatch read them.
#pragma once

#include "device.cuh"
#include "kernels.h"

namespace afd {

__device__ __forceinline__ int64_t id_at(const DeviceIds& ids, int64_t token, int64_t k) {
  const int64_t i = token * ids.row + k * ids.column;
  return ids.wide ? static_cast<const int64_t*>(ids.data)[i] : static_cast<const int32_t*>(ids.data)[i];
}

// One word of a token's mask of F ranks, by a whole warp.
__device__ __forceinline__ uint32_t mask_word(const DeviceIds& ids, int64_t token, int64_t topk, int64_t experts,
                                              const int2* expert_map, int word) {
  uint32_t bits = 0;
  for (int64_t k = threadIdx.x % 32; k < topk; k += 32) {
    const int64_t id = id_at(ids, token, k);
    if (id < 0 || id >= experts) continue;
    const int f = expert_map[id].x;
    if (f / 32 == word) bits |= 1u << (f % 32);
  }
  return __reduce_or_sync(kWarp, bits);
}

// The ranks of choices within their experts, token-major, by one CTA: every warp counts its share of the choices by
// expert, the shares are added up in warp order, then every warp ranks its share from where the warps before it end. A
// share that is all skips the counting. The ranks are the same in every run.
//
// load(i) reads choice i = token * topk + k into a struct with an `id`; `first` is this thread's load(share.first()),
// so that the caller can ask for it early. place(i, choice, rank) is called once per choice, with id in [0, experts) or
// -1; bad(id) before it for an id outside that range. `memory` is [share.rows(), experts], zeroed before a
// __syncthreads by the caller; after another one its last row holds the counts.
struct Share {
  uint32_t begin, end, warps;
  // The choices of this warp; `warps` have any. A multiple of 32 each, so that they differ by one step at most.
  __device__ Share(uint32_t n, uint32_t most) {
    const uint32_t steps = (n + 31) / 32, each = (steps + most - 1) / most;
    warps = each > 0 ? (steps + each - 1) / each : 0;
    begin = threadIdx.x / 32 * each * 32;
    end = begin + each * 32 < n ? begin + each * 32 : n;
  }
  __device__ uint32_t rows() const { return warps > 0 ? warps : 1; }
  __device__ uint32_t first() const { return begin + threadIdx.x % 32; }
};

template <typename Choice, typename Load, typename Place, typename Bad>
__device__ void rank_choices(const Share& share, const Choice& first, int64_t experts, int32_t* memory, Load load,
                             Place place, Bad bad) {
  const uint32_t lane = threadIdx.x % 32;
  int32_t* mine = memory + threadIdx.x / 32 * experts;  // counts of this warp's share; then the rank of its next choice
  const auto each_step = [&](auto step) {
    Choice next = first;
    for (uint32_t begin = share.begin; begin < share.end; begin += 32) {
      const uint32_t i = begin + lane;
      Choice choice = next;
      if (i + 32 < share.end) next = load(i + 32);
      const bool valid = i < share.end && choice.id >= 0 && choice.id < experts;
      const int32_t id = valid ? static_cast<int32_t>(choice.id) : -1;
      const uint32_t same = __match_any_sync(kWarp, id);
      const int32_t before = __popc(same & ((1u << lane) - 1));
      step(i, choice, id, before, __popc(same));
      __syncwarp();
    }
  };
  if (share.warps > 1) {
    each_step([&](uint32_t, const Choice&, int32_t id, int32_t before, int32_t all) {
      if (id >= 0 && before == 0) mine[id] += all;
    });
    __syncthreads();
    for (int64_t e = threadIdx.x; e < experts; e += blockDim.x) {
      int32_t total = 0;
      for (uint32_t w = 0; w < share.warps; ++w) {
        const int32_t n = memory[w * experts + e];
        memory[w * experts + e] = total;
        total += n;
      }
    }
    __syncthreads();
  }
  each_step([&](uint32_t i, Choice choice, int32_t id, int32_t before, int32_t all) {
    const int32_t rank = id >= 0 ? mine[id] + before : -1;
    __syncwarp();
    if (id >= 0 && before == 0) mine[id] += all;
    if (i >= share.end) return;
    if (choice.id < -1 || choice.id >= experts) bad(choice.id);
    choice.id = id;
    place(i, choice, rank);
  });
}

}  // namespace afd
