// The two 8-bit floating-point formats of "FP8 Formats for Deep Learning" (arXiv 2209.05433): e4m3 (no
// infinity, 448 the greatest) and e5m2 (IEEE-like, 57344 the greatest finite).
#pragma once

#include <algorithm>
#include <cmath>

#include "cuda_runtime_api.h"

#define __CUDA_FP8_TYPES_EXIST__
typedef unsigned char __nv_fp8_storage_t;
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };

static inline float egpu_fp8_to_float(__nv_fp8_storage_t bits, __nv_fp8_interpretation_t kind) {
  int mantissa_bits = kind == __NV_E4M3 ? 3 : 2, bias = kind == __NV_E4M3 ? 7 : 15;
  int mantissa = bits & ((1 << mantissa_bits) - 1), exponent = (bits & 0x7f) >> mantissa_bits;
  float sign = bits & 0x80 ? -1.0f : 1.0f;
  if (kind == __NV_E4M3 && (bits & 0x7f) == 0x7f) return NAN;
  if (kind == __NV_E5M2 && exponent == 31) return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits);
  return sign *
         std::ldexp(static_cast<float>(mantissa | 1 << mantissa_bits), exponent - bias - mantissa_bits);
}

// To the nearest, ties to even; a value that is too large becomes the greatest finite value.
static inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float value, __nv_saturation_t,
                                                       __nv_fp8_interpretation_t kind) {
  int mantissa_bits = kind == __NV_E4M3 ? 3 : 2, bias = kind == __NV_E4M3 ? 7 : 15;
  float greatest = kind == __NV_E4M3 ? 448.0f : 57344.0f, size = std::fabs(value);
  __nv_fp8_storage_t sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return kind == __NV_E4M3 ? 0x7f : 0x7e;
  if (size >= greatest) return sign | (kind == __NV_E4M3 ? 0x7e : 0x7b);
  int exponent = size == 0 ? 1 - bias : std::max(std::ilogb(size), 1 - bias);
  int scaled =
      static_cast<int>(std::nearbyint(std::ldexp(size, mantissa_bits - exponent)));  // with its leading bit
  if (scaled >> (mantissa_bits + 1)) {
    scaled >>= 1;
    ++exponent;
  }
  if (!(scaled >> mantissa_bits)) return sign | scaled;  // subnormal
  return sign | (exponent + bias) << mantissa_bits | (scaled & ((1 << mantissa_bits) - 1));
}

template <__nv_fp8_interpretation_t kind>
struct egpu_fp8 {
  __nv_fp8_storage_t __x;
  egpu_fp8() = default;
  explicit egpu_fp8(float value) : __x(__nv_cvt_float_to_fp8(value, __NV_SATFINITE, kind)) {}
  explicit operator float() const { return egpu_fp8_to_float(__x, kind); }
};
typedef egpu_fp8<__NV_E4M3> __nv_fp8_e4m3;
typedef egpu_fp8<__NV_E5M2> __nv_fp8_e5m2;
