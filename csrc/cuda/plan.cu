// plan: which F ranks need a token, and where each of its choices goes there. A pure function.
//   moves    T x topk ids in; [F, T, topk] positions, [F, local_experts] counts, [T, ceil(F / 32)] masks out
//   launch   1 CTA of 512 threads
//   waits    never
//   fails    an id outside [-1, E) counts as -1; only a dispatch has a window to record it in
#include "ids.cuh"

namespace afd {
namespace {

constexpr int kThreads = 512;

__global__ void __launch_bounds__(kThreads)
    plan_kernel(DeviceIds ids, int64_t tokens, int64_t topk, const int2* expert_map, int64_t experts, int64_t ffn_size,
                int64_t local_experts, Position* position, int32_t* counts, int32_t* masks) {
  extern __shared__ int32_t memory[];
  for (int64_t i = threadIdx.x; i < ffn_size * local_experts; i += blockDim.x) counts[i] = 0;
  struct Choice {
    int64_t id;
  };
  const uint32_t width = static_cast<uint32_t>(topk), n = static_cast<uint32_t>(tokens) * width;
  const Share share(n, rank_warps(experts, 0, kThreads / 32));
  for (int64_t i = threadIdx.x; i < share.rows() * experts; i += blockDim.x) memory[i] = 0;
  const auto choice = [&](uint32_t i) -> Choice { return {id_at(ids, i / width, i % width)}; };
  const Choice first = share.first() < share.end ? choice(share.first()) : Choice{-1};
  __syncthreads();
  rank_choices(
      share, first, experts, memory, choice,
      [&](uint32_t i, const Choice& at, int32_t rank) {
        const int2 owner = at.id >= 0 ? expert_map[at.id] : make_int2(-1, -1);
        for (int64_t f = 0; f < ffn_size; ++f)
          position[f * tokens * topk + i] = owner.x == f ? Position{owner.y, rank} : Position{-1, -1};
      },
      [](int64_t) {});
  __syncthreads();
  const int32_t* found = memory + (share.rows() - 1) * experts;
  for (int64_t e = threadIdx.x; e < experts; e += blockDim.x) {
    const int2 owner = expert_map[e];
    if (owner.x >= 0 && owner.x < ffn_size && owner.y >= 0 &&
        owner.y < local_experts)  // the map's content is not checked
      counts[owner.x * local_experts + owner.y] = found[e];
  }
  const int words = static_cast<int>((ffn_size + 31) / 32);
  for (int64_t t = threadIdx.x / 32; t < tokens; t += blockDim.x / 32)
    for (int w = 0; w < words; ++w) {
      const uint32_t bits = mask_word(ids, t, topk, experts, expert_map, w);
      if (threadIdx.x % 32 == 0) masks[t * words + w] = static_cast<int32_t>(bits);
    }
}

}  // namespace

void launch_plan(DeviceIds ids, int64_t tokens, int64_t topk, const int32_t* expert_map, int64_t num_experts,
                 int64_t ffn_size, int64_t local_experts, Position* position, int32_t* counts, int32_t* masks,
                 cudaStream_t stream) {
  plan_kernel<<<1, kThreads, rank_bytes(num_experts, 0, kThreads / 32), stream>>>(
      ids, tokens, topk, reinterpret_cast<const int2*>(expert_map), num_experts, ffn_size, local_experts, position,
      counts, masks);
}

cudaError_t preload_plan() {
  cudaFuncAttributes a;
  return cudaFuncGetAttributes(&a, plan_kernel);
}

}  // namespace afd
