// bfloat16 as NCCL's host code needs it.
#pragma once

#include "cuda_runtime_api.h"

#define __CUDA_BF16_TYPES_EXIST__

struct __nv_bfloat16 {
  unsigned short bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float value) {  // to the nearest, ties to even; NaN stays NaN
    unsigned all;
    __builtin_memcpy(&all, &value, 4);
    bool nan = (all & 0x7fffffff) > 0x7f800000;
    bits = static_cast<unsigned short>(nan ? 0x7fff : (all + 0x7fff + (all >> 16 & 1)) >> 16);
  }
  explicit operator float() const {
    unsigned all = static_cast<unsigned>(bits) << 16;
    float value;
    __builtin_memcpy(&value, &all, 4);
    return value;
  }
};

static inline __nv_bfloat16 __float2bfloat16(float value) { return __nv_bfloat16(value); }
static inline float __bfloat162float(__nv_bfloat16 value) { return static_cast<float>(value); }
