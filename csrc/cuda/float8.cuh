// The cast of dispatch: bfloat16 to float8_e4m3fn with a scale per block. The arithmetic is wire.h's, bit for bit.
#pragma once

#include <cuda_fp8.h>

#include "device.cuh"

namespace afd {

constexpr uint32_t kPerLane = 16;                         // channels: 32 bytes in, 16 out
constexpr uint32_t kBlockLanes = kScaleBlock / kPerLane;  // neighbours that share a scale

struct Float8 {
  int4 elements;
  float scale;
};

// By a whole warp: lanes 8 i to 8 i + 7 hold block i.
__device__ __forceinline__ Float8 quantize(const int4 (&wide)[2]) {
  const auto* pair = reinterpret_cast<const uint32_t*>(wide);
  uint32_t top = (__float_as_uint(kLeastAmax) >> 16) * 0x10001u;
#pragma unroll
  for (uint32_t i = 0; i < kPerLane / 2; ++i) top = __vmaxu2(top, pair[i] & 0x7fff7fffu);
#pragma unroll
  for (uint32_t other = kBlockLanes / 2; other > 0; other /= 2) top = __vmaxu2(top, __shfl_xor_sync(kWarp, top, other));
  const float amax = __uint_as_float(max(top << 16, top & 0xffff0000u));
  const float inverse = __fdiv_rn(kFloat8Max, amax);
  Float8 out;
  out.scale = __fdiv_rn(amax, kFloat8Max);
  auto* bytes = reinterpret_cast<__nv_fp8x2_storage_t*>(&out.elements);
#pragma unroll
  for (uint32_t i = 0; i < kPerLane / 2; ++i)
    bytes[i] = __nv_cvt_float2_to_fp8x2(make_float2(__fmul_rn(__uint_as_float(pair[i] << 16), inverse),
                                                    __fmul_rn(__uint_as_float(pair[i] & 0xffff0000u), inverse)),
                                        __NV_SATFINITE, __NV_E4M3);
  return out;
}

}  // namespace afd
