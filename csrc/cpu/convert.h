// convert.h: rows of payload to float32 and back. Plain loops: the compiler vectorises them.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "../wire.h"

namespace afd {

// acc += weight * row
template <typename T>
void accumulate(float* __restrict acc, const T* __restrict row, float weight, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] += weight * static_cast<float>(row[i]);
}

template <typename T>
void widen(float* __restrict acc, const T* __restrict row, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] = static_cast<float>(row[i]);
}

// The one rounding of a sum.
template <typename T>
void narrow(T* __restrict row, const float* __restrict acc, int64_t n) {
  for (int64_t i = 0; i < n; ++i) row[i] = static_cast<T>(acc[i]);
}

// Calls f with a value of the C++ type of `type`.
template <typename F>
void visit(int64_t type, F&& f) {
  switch (type) {
    case k_float32:
      return f(float{});
    case k_bfloat16:
      return f(torch::headeronly::BFloat16{});
    default:
      return f(torch::headeronly::Half{});
  }
}

}  // namespace afd
