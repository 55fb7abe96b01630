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
  return __reduce_or_sync(0xffffffffu, bits);
}

// The ranks of choices within their experts, token-major, by one CTA. `running` [experts] is zeroed by the caller,
// before a __syncthreads, and holds the counts afterwards. load(i) reads choice i = token * topk + k into a struct with
// an `id`; `first` is load(threadIdx.x), so that the caller can ask for it early. place(i, choice, rank) is called once
// per choice, with id in [0, experts) or -1; bad(id) before it for an id outside that range. Warps take their turn in
// order, so the ranks are the same in every run.
template <typename Choice, typename Load, typename Place, typename Bad>
__device__ void rank_choices(const Choice& first, uint32_t n, int64_t experts, int32_t* running, Load load, Place place,
                             Bad bad) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  Choice next = first;
  for (uint32_t begin = 0; begin < n; begin += blockDim.x) {
    const uint32_t i = begin + threadIdx.x, left = n - begin;
    Choice choice = next;
    if (left > blockDim.x && i + blockDim.x < n) next = load(i + blockDim.x);
    if (i >= n) choice.id = -1;
    if (choice.id < -1 || choice.id >= experts) {
      bad(choice.id);
      choice.id = -1;
    }
    const uint32_t same = __match_any_sync(0xffffffffu, static_cast<int32_t>(choice.id));
    const int before = __popc(same & ((1u << lane) - 1));
    int32_t rank = -1;
    for (uint32_t w = 0; w < warps && w * 32 < left; ++w) {
      if (warp == w) {
        if (choice.id >= 0) rank = running[choice.id] + before;
        __syncwarp();
        if (choice.id >= 0 && before == 0) running[choice.id] += __popc(same);
      }
      __syncthreads();
    }
    if (i < n) place(i, choice, rank);
  }
}

}  // namespace afd
