// The routing plan, as afd::plan returns it and as dispatch writes it into its peers' slots.
#pragma once

#include <vector>

#include "../checks.h"

namespace afd {

// Raises on the first id outside [-1, experts).
void check_plan(Op op, const Ids& ids, int64_t tokens, int64_t topk, int64_t experts);

// For every F rank f: position[f][t, k] and counts[f][local expert] (zeroed by the caller); for every token the mask of
// F ranks that need it, masks[t * mask_stride + f / 32] (zeroed by the caller). Ids have passed check_plan.
void plan(const Ids& ids, int64_t tokens, int64_t topk, const int32_t* expert_map, int64_t ffn_size,
          Position* const* position, int32_t* const* counts, int32_t* masks, int64_t mask_stride);

}  // namespace afd
