// Half precision as NCCL's host code needs it: a type of 16 bits, and the conversion of the scalar of an
// average.
#pragma once

#include "cuda_runtime_api.h"

#define __CUDA_FP16_TYPES_EXIST__

struct __half {
  _Float16 value;
  __half() = default;
  explicit __half(float from) : value(static_cast<_Float16>(from)) {}
  explicit operator float() const { return static_cast<float>(value); }
};
typedef __half half;

static inline half __float2half(float value) { return half(value); }
static inline half __float2half_rn(float value) { return half(value); }
static inline float __half2float(half value) { return static_cast<float>(value); }
