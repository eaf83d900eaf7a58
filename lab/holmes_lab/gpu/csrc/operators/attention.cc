// Attention. CUDA's fused operators (flash, memory-efficient) are computed as the CPU computes the same call:
// by its flash kernel where torch would choose that, else by plain matrix products.
//
// query [batch, heads, queries, width]; key, value [batch, heads or a divisor of them, keys, width]. With
// dropout the operators give the generator's seed and offset to their backward, in `philox_seed` and
// `philox_offset`.

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>

#include <cmath>

#include "attention.h"

namespace operators {

using at::Tensor;

namespace {

// Whether the CPU would take its flash kernel: torch's own conditions, as in its sdp_utils_cpp.cpp, without
// the backends that the program allows: these are meant for CUDA (and may have changed before this kernel
// runs).
bool takes_flash(const Attention& call, const Tensor& query, const Tensor& key, const Tensor& value) {
  bool grouped = query.size(1) != key.size(1);
  sdp::sdp_params params{query, key, value, call.mask, call.dropout, call.causal, grouped};
  bool same_width = query.size(-1) == key.size(-1) && query.size(-1) == value.size(-1);
  return same_width && at::isFloatingType(query.scalar_type()) && sdp::check_for_dropout(params, false) &&
         sdp::check_tensor_shapes(params, false) &&
         sdp::check_batch_size_and_num_heads_dense</*supports_gqa=*/true>(params, false) &&
         sdp::check_attn_mask_shape(params, false) &&
         sdp::check_nonzero_sequence_lengths_dense(params, false) &&
         sdp::check_last_dim_stride_equals_1_dense</*ignore_singleton_dim=*/false>(params, false);
}

double scale_of(const Attention& call, const Tensor& query) {
  return call.scale ? *call.scale : 1.0 / std::sqrt(static_cast<double>(query.size(-1)));
}

// key or value with one head for each head of the query
Tensor each_head(const Tensor& tensor, const Tensor& query) {
  int64_t times = query.size(1) / tensor.size(1);
  return times == 1 ? tensor : tensor.repeat_interleave(times, 1);
}

// scale * query @ key^T + mask, [batch, heads, queries, keys], float or double
Tensor scores(const Attention& call, const Tensor& query, const Tensor& key) {
  at::ScalarType type = at::toOpMathType(query.scalar_type());
  Tensor result = at::matmul(query.to(type) * scale_of(call, query), key.to(type).transpose(-2, -1));
  if (call.mask) result = result + *call.mask;
  if (call.causal) {
    Tensor hidden = at::ones({query.size(2), key.size(2)}, query.options().dtype(at::kBool)).triu(1);
    result = result.masked_fill(hidden, -INFINITY);
  }
  return result;
}

// 0 or 1 / (1 - dropout)
Tensor dropout_factors(const Attention& call, const Tensor& like) {
  return at::empty_like(like).bernoulli_(1 - call.dropout, generator_of(call.seed)).div_(1 - call.dropout);
}

Tensor sum_heads(const Tensor& grad, const Tensor& like) {
  if (grad.size(1) == like.size(1)) return grad.to(like.scalar_type());
  return grad.view({grad.size(0), like.size(1), -1, grad.size(2), grad.size(3)})
      .sum(2)
      .to(like.scalar_type());
}

}  // namespace

std::tuple<Tensor, Tensor> attend(const Attention& call, const Tensor& query, const Tensor& key,
                                  const Tensor& value) {
  if (takes_flash(call, query, key, value)) {
    return at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, call.causal, call.mask,
                                                           call.scale);
  }
  Tensor all_keys = each_head(key, query), all_values = each_head(value, query);
  Tensor lse = scores(call, query, all_keys).logsumexp(-1).to(at::kFloat);
  std::optional<Tensor> kept;
  if (call.dropout > 0) kept = dropout_factors(call, scores(call, query, all_keys)).to(at::kBool);
  Tensor output = std::get<0>(at::_scaled_dot_product_attention_math(
      query, all_keys, all_values, call.mask, call.dropout, call.causal, kept, call.scale));
  // As the fused operators lay it out: [batch, queries, heads, width] in memory.
  return {output.transpose(1, 2).contiguous().transpose(1, 2), lse};
}

AttentionGradients attend_backward(const Attention& call, const Tensor& grad, const Tensor& query,
                                   const Tensor& key, const Tensor& value, const Tensor& output,
                                   const Tensor& lse, bool mask_wanted) {
  if (!mask_wanted && takes_flash(call, query, key, value)) {
    auto [grad_query, grad_key, grad_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, output, lse.transpose(1, 2).contiguous().transpose(1, 2), 0.0, call.causal,
        call.mask, call.scale);
    return {grad_query, grad_key, grad_value, Tensor()};
  }
  at::ScalarType type = at::toOpMathType(query.scalar_type());
  Tensor all_keys = each_head(key, query).to(type), all_values = each_head(value, query).to(type);
  Tensor grad_out = grad.to(type);
  Tensor weights = (scores(call, query, all_keys) - lse.unsqueeze(-1)).exp();
  weights = weights.masked_fill(lse.unsqueeze(-1) == -INFINITY, 0);  // rows that see nothing
  Tensor grad_weights = at::matmul(grad_out, all_values.transpose(-2, -1)), used = weights;
  if (call.dropout > 0) {
    Tensor factors = dropout_factors(call, weights);
    used = weights * factors;
    grad_weights = grad_weights * factors;
  }
  Tensor inner = (grad_out * output.to(type)).sum(-1, /*keepdim=*/true);
  Tensor grad_scores = weights * (grad_weights - inner);
  double scale = scale_of(call, query);
  AttentionGradients result;
  result.query = (at::matmul(grad_scores, all_keys) * scale).to(query.scalar_type());
  result.key = sum_heads(at::matmul(grad_scores.transpose(-2, -1), query.to(type)) * scale, key);
  result.value = sum_heads(at::matmul(used.transpose(-2, -1), grad_out), value);
  if (mask_wanted) {
    std::vector<int64_t> shape(call.mask->sizes().begin(), call.mask->sizes().end());
    result.mask = at::sum_to(grad_scores.to(call.mask->scalar_type()), at::IntArrayRef(shape));
  }
  return result;
}

Tensor number(int64_t value) { return at::full({}, value, at::TensorOptions().dtype(at::kLong)); }

namespace {

Tensor nothing(const Tensor& like) { return at::empty({0}, like.options()); }

Seed seed_in(const Tensor& seed, const Tensor& offset) {
  return {static_cast<uint64_t>(seed.item<int64_t>()), static_cast<uint64_t>(offset.item<int64_t>())};
}

Seed seed_in_state(const Tensor& state) {
  return seed_in(state.view(at::kLong)[0], state.view(at::kLong)[1]);
}

using FlashResult = std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t, Tensor, Tensor, Tensor>;

FlashResult flash(const Tensor& query, const Tensor& key, const Tensor& value, double dropout, bool causal,
                  bool, std::optional<double> scale) {
  Attention call{std::nullopt, dropout, causal, scale, seed_of_call()};
  auto [output, lse] = attend(call, query, key, value);
  return {output,
          lse,
          Tensor(),
          Tensor(),
          query.size(2),
          key.size(2),
          state_of(call.seed),
          nothing(query).to(at::kLong),
          nothing(query)};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& grad, const Tensor& query, const Tensor& key,
                                                  const Tensor& value, const Tensor& output,
                                                  const Tensor& lse, const Tensor&, const Tensor&, int64_t,
                                                  int64_t, double dropout, bool causal, const Tensor& state,
                                                  const Tensor&, std::optional<double> scale) {
  Attention call{std::nullopt, dropout, causal, scale, dropout > 0 ? seed_in_state(state) : Seed()};
  AttentionGradients found = attend_backward(call, grad, query, key, value, output, lse, false);
  return {found.query, found.key, found.value};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& query, const Tensor& key,
                                                     const Tensor& value, const std::optional<Tensor>& bias,
                                                     bool with_lse, double dropout, bool causal,
                                                     std::optional<double> scale) {
  Attention call{bias, dropout, causal, scale, seed_of_call()};
  auto [output, lse] = attend(call, query, key, value);
  Tensor kept = with_lse ? lse : at::empty({query.size(0), query.size(1), 0}, lse.options());
  return {output, kept, number(static_cast<int64_t>(call.seed.seed)),
          number(static_cast<int64_t>(call.seed.offset))};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias,
    const Tensor& output, const Tensor& lse, const Tensor& seed, const Tensor& offset, double dropout,
    std::array<bool, 4> wanted, bool causal, std::optional<double> scale) {
  if (!grad.defined()) return {};
  Attention call{bias.defined() ? std::optional<Tensor>(bias) : std::nullopt, dropout, causal, scale,
                 dropout > 0 ? seed_in(seed, offset) : Seed()};
  AttentionGradients found =
      attend_backward(call, grad, query, key, value, output, lse, wanted[3] && bias.defined());
  return {found.query, found.key, found.value, found.mask};
}

}  // namespace

Tensor state_of(const Seed& seed) {
  Tensor state = at::empty({2}, at::TensorOptions().dtype(at::kLong));
  state[0] = static_cast<int64_t>(seed.seed);
  state[1] = static_cast<int64_t>(seed.offset);
  return state.view(at::kUInt64);
}

Seed seed_of(const Tensor& state) { return seed_in_state(state); }

OwnKernels attention_kernels() {
  return {
      {"_scaled_dot_product_flash_attention", host_kernel(flash), /*random=*/true},
      {"_scaled_dot_product_flash_attention_backward", host_kernel(flash_backward)},
      {"_scaled_dot_product_efficient_attention", host_kernel(efficient), /*random=*/true},
      {"_scaled_dot_product_efficient_attention_backward", host_kernel(efficient_backward)},
  };
}

}  // namespace operators
