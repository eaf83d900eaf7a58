// Attention on the CPU as CUDA's fused operators ask for it (attention.cc), for several sequences in one
// tensor too (packed_attention.cc).
#pragma once

#include <ATen/core/Tensor.h>

#include "own.h"

namespace operators {

struct Attention {
  std::optional<at::Tensor> mask;  // added to the scores
  double dropout = 0;
  bool causal = false;          // query i sees keys 0 to i
  std::optional<double> scale;  // nullopt: 1 / sqrt(width)
  Seed seed;                    // of the dropout
};

struct AttentionGradients {
  at::Tensor query, key, value, mask;
};

// The output, and the logarithm of the sum of the scores' exponentials, [batch, heads, queries].
std::tuple<at::Tensor, at::Tensor> attend(const Attention& call, const at::Tensor& query,
                                          const at::Tensor& key, const at::Tensor& value);
AttentionGradients attend_backward(const Attention& call, const at::Tensor& grad, const at::Tensor& query,
                                   const at::Tensor& key, const at::Tensor& value, const at::Tensor& output,
                                   const at::Tensor& lse, bool mask_wanted);

at::Tensor state_of(const Seed& seed);  // as flash attention returns it: two unsigned 64-bit numbers
Seed seed_of(const at::Tensor& state);
at::Tensor number(int64_t value);

}  // namespace operators
