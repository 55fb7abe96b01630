// convert.h: rows of payload to float32 and back. Plain loops: the compiler vectorises them, once per vector width, and
// the loader takes the widest that the machine has.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "../wire.h"

// x86-64-v3 is AVX2 with FMA, v4 is AVX-512. Not under ThreadSanitizer: the loader would call into it before it is up.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12 && !defined(__SANITIZE_THREAD__)
#define AFD_WIDEST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define AFD_WIDEST
#endif

namespace afd {

// acc += weight * row
template <typename T>
AFD_WIDEST void accumulate(float* __restrict acc, const T* __restrict row, float weight, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] += weight * static_cast<float>(row[i]);
}

// acc += weight_a * a, then += weight_b * b: what two calls of the above give, with half the traffic of acc.
template <typename T>
AFD_WIDEST void accumulate(float* __restrict acc, const T* __restrict a, float weight_a, const T* __restrict b,
                           float weight_b, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    acc[i] = acc[i] + weight_a * static_cast<float>(a[i]) + weight_b * static_cast<float>(b[i]);
}

template <typename T>
AFD_WIDEST void widen(float* __restrict acc, const T* __restrict row, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] = static_cast<float>(row[i]);
}

// The one rounding of a sum.
template <typename T>
AFD_WIDEST void narrow(T* __restrict row, const float* __restrict acc, int64_t n) {
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
