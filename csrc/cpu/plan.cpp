// plan: which F ranks need a token, and where each of its choices goes there.
//   moves    T x topk ids in; [F, T, topk] positions, [F, local_experts] counts, [T, ceil(F / 32)] masks out
//   order    none: a pure function of its arguments
//   waits    never
//   fails    an id outside [-1, E): raises before it writes
#include "plan.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

namespace afd {

void check_plan(Op op, const Ids& ids, int64_t tokens, int64_t topk, int64_t experts) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t k = 0; k < topk; ++k) check_id(op, ids.at(t, k), experts, t, k);
}

void plan(const Ids& ids, int64_t tokens, int64_t topk, const int32_t* expert_map, int64_t ffn_size,
          Position* const* position, int32_t* const* counts, int32_t* masks, int64_t mask_stride) {
  for (int64_t f = 0; f < ffn_size; ++f) std::fill_n(position[f], tokens * topk, Position{-1, -1});
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t k = 0; k < topk; ++k) {
      const int64_t id = ids.at(t, k);
      if (id < 0) continue;
      const int32_t f = expert_map[2 * id], local = expert_map[2 * id + 1];
      position[f][t * topk + k] = {local, counts[f][local]++};
      masks[t * mask_stride + f / 32] |= static_cast<int32_t>(1u << (f % 32));
    }
  }
}

namespace {

std::tuple<Tensor, Tensor, Tensor> plan_cpu(const Tensor& topk_ids, const Tensor& expert_map, int64_t ffn_size,
                                            int64_t local_experts) {
  check_dim(Op::plan, "topk_ids", topk_ids, 2);
  const int64_t tokens = topk_ids.size(0), topk = topk_ids.size(1);
  check_ids(Op::plan, topk_ids, tokens, topk);
  check_dim(Op::plan, "expert_map", expert_map, 2);
  check_size(Op::plan, "expert_map", expert_map, 1, 2);
  check_type(Op::plan, "expert_map", expert_map, ScalarType::Int);
  if (!expert_map.is_contiguous()) raise(Kind::Argument, Op::plan, "expert_map is not contiguous");
  const auto* map = static_cast<const int32_t*>(expert_map.const_data_ptr());
  for (int64_t e = 0; e < expert_map.size(0); ++e)
    if (map[2 * e] < 0 || map[2 * e] >= ffn_size || map[2 * e + 1] < 0 || map[2 * e + 1] >= local_experts)
      raise(Kind::Argument, Op::plan, "expert_map[", e, "] is (", map[2 * e], ", ", map[2 * e + 1],
            "), expected below (", ffn_size, ", ", local_experts, ")");
  const Ids ids(topk_ids);
  check_plan(Op::plan, ids, tokens, topk, expert_map.size(0));

  const int64_t words = (ffn_size + 31) / 32;
  Tensor position = torch::stable::new_empty(topk_ids, {ffn_size, tokens, topk, 2}, ScalarType::Int);
  Tensor counts = torch::stable::new_zeros(topk_ids, {ffn_size, local_experts}, ScalarType::Int);
  Tensor masks = torch::stable::new_zeros(topk_ids, {tokens, words}, ScalarType::Int);
  std::vector<Position*> positions(ffn_size);
  std::vector<int32_t*> count(ffn_size);
  for (int64_t f = 0; f < ffn_size; ++f) {
    positions[f] = static_cast<Position*>(position.mutable_data_ptr()) + f * tokens * topk;
    count[f] = static_cast<int32_t*>(counts.mutable_data_ptr()) + f * local_experts;
  }
  plan(ids, tokens, topk, map, ffn_size, positions.data(), count.data(),
       static_cast<int32_t*>(masks.mutable_data_ptr()), words);
  return {position, counts, masks};
}

}  // namespace
}  // namespace afd

STABLE_TORCH_LIBRARY_IMPL(afd, CPU, m) { m.impl("plan", TORCH_BOX(&afd::plan_cpu)); }
