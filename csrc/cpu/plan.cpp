// plan: which F ranks need a token, and where each of its choices goes there.
//   moves    T x topk ids in; per F rank [T, topk] positions and [local_experts] counts, [T, ceil(F / 32)] masks out
//   order    none: a function of its arguments alone
//   waits    never
//   fails    an id outside [-1, E): check_ids raises before anything is written
#include <algorithm>

#include "kernels.h"

namespace afd {

void check_ids(Op op, const Ids& ids, int64_t tokens, int64_t topk, int64_t experts) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t k = 0; k < topk; ++k) {
      const int64_t id = ids.at(t, k);
      if (id < -1 || id >= experts)
        raise(Kind::Argument, op, "topk_ids[", t, ", ", k, "] is ", id, ", expected -1 (no expert) or 0 to ",
              experts - 1);
    }
}

void plan(const Ids& ids, int64_t tokens, int64_t topk, const int32_t* expert_map, int64_t ffn_size,
          Position* const* position, int32_t* const* counts, int32_t* masks, int64_t mask_stride) {
  for (int64_t f = 0; f < ffn_size; ++f)
    if (position[f] != nullptr) std::fill_n(position[f], tokens * topk, Position{-1, -1});
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t k = 0; k < topk; ++k) {
      const int64_t id = ids.at(t, k);
      if (id < 0) continue;
      const int32_t f = expert_map[2 * id], local = expert_map[2 * id + 1];
      if (position[f] != nullptr) position[f][t * topk + k] = {local, counts[f][local]++};
      masks[t * mask_stride + f / 32] |= static_cast<int32_t>(1u << (f % 32));
    }
  }
}

}  // namespace afd
