// convert.h: rows of payload to float32 and back. Plain loops: the compiler vectorises them, once per vector width, and
// the loader takes the widest that the machine has.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <bit>

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

// A row of bfloat16 to float8_e4m3fn and its scales: wire.h says how. On bits, since there is no type of 8 bits that a
// compiler vectorises; n is a multiple of kScaleBlock.
AFD_WIDEST inline void quantize(uint8_t* __restrict out, float* __restrict scales, const uint16_t* __restrict row,
                                int64_t n) {
  constexpr auto least = std::bit_cast<uint32_t>(kLeastAmax);
  static_assert((least & 0xffff) == 0);  // it is a bfloat16
  for (int64_t b = 0; b < n / kScaleBlock; ++b) {
    uint16_t top = least >> 16;
    for (int64_t i = 0; i < kScaleBlock; ++i) {
      const auto bits = static_cast<uint16_t>(row[b * kScaleBlock + i] & 0x7fff);
      top = bits > top ? bits : top;
    }
    const float amax = std::bit_cast<float>(static_cast<uint32_t>(top) << 16), inverse = kFloat8Max / amax;
    scales[b] = amax / kFloat8Max;
    for (int64_t i = b * kScaleBlock; i < (b + 1) * kScaleBlock; ++i) {
      const float x = std::bit_cast<float>(static_cast<uint32_t>(row[i]) << 16) * inverse;
      const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffff;
      // A float32's 20 lowest bits are rounded off and its exponent is rebased from 127 to 7. Below 2^-6 elements are
      // multiples of 2^-9, which is what is left of a float32 next to 2^14.
      const uint32_t normal = (magnitude - (120u << 23) + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
      const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) & 0xff;
      const uint32_t rounded = magnitude < (121u << 23) ? subnormal : normal;
      out[i] = static_cast<uint8_t>(magnitude > 0x7f800000 ? 0x7f : (bits >> 24 & 0x80) | rounded);
    }
  }
}

// Calls f with a value of the C++ type of `type`, a wide one.
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
