// CUDA's attention operators below scaled_dot_product_attention: heads behind positions, and several
// sequences of different lengths packed into one tensor (nested tensors, variable-length attention).
//
//     query [batch, queries, heads, width], or packed [all queries, heads, width]: sequence i has the rows
//     from bounds[i] to bounds[i + 1]

#include <ATen/ATen.h>

#include <cmath>

#include "attention.h"

namespace operators {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Which keys a query sees. Positions count from the last query and the last key (from_end) or from the first.
struct Window {
  int64_t left = -1, right = -1;  // positions before and after its own; -1: all
  bool from_end = true;

  void apply_to(Attention* call, int64_t queries, int64_t keys, const Tensor& like) const {
    if (left < 0 && right < 0) return;
    if (left < 0 && right == 0 && (queries == keys || !from_end)) {
      call->causal = true;
      return;
    }
    int64_t shift = from_end ? keys - queries : 0;
    Tensor positions = at::arange(keys).unsqueeze(0) - at::arange(queries).unsqueeze(1) - shift;
    Tensor hidden = at::zeros({queries, keys}, at::kBool);
    if (right >= 0) hidden = hidden.logical_or(positions > right);
    if (left >= 0) hidden = hidden.logical_or(positions < -left);
    Tensor mask = at::zeros({queries, keys}, like.options()).masked_fill_(hidden, -INFINITY);
    call->mask = call->mask ? *call->mask + mask : mask;
  }
};

// One call of attend() for one sequence, or for all where all are equally long.
struct Part {
  int64_t first_query = 0, queries = 0, first_key = 0, keys = 0;
  bool packed = false;

  Tensor query(const Tensor& tensor) const { return cut(tensor, first_query, queries); }
  Tensor key(const Tensor& tensor) const { return cut(tensor, first_key, keys); }

 private:
  // [batch, heads, positions, width]
  Tensor cut(const Tensor& tensor, int64_t first, int64_t count) const {
    if (!packed) return tensor.transpose(1, 2);
    Tensor rows = tensor.dim() == 4 ? tensor.squeeze(0) : tensor;
    return rows.narrow(0, first, count).transpose(0, 1).unsqueeze(0);
  }
};

std::vector<Part> parts_of(const Tensor& query, const Tensor& key, const OptionalTensor& query_bounds,
                           const OptionalTensor& key_bounds) {
  if (!query_bounds || !query_bounds->defined()) return {{0, query.size(1), 0, key.size(1), false}};
  Tensor queries = query_bounds->to(at::kLong), keys = key_bounds->to(at::kLong);
  std::vector<Part> parts;
  for (int64_t index = 0; index + 1 < queries.numel(); ++index) {
    int64_t first_query = queries[index].item<int64_t>(), first_key = keys[index].item<int64_t>();
    parts.push_back({first_query, queries[index + 1].item<int64_t>() - first_query, first_key,
                     keys[index + 1].item<int64_t>() - first_key, true});
  }
  return parts;
}

Attention call_for(const Part& part, size_t index, const OptionalTensor& bias, double dropout,
                   const Window& window, std::optional<double> scale, Seed seed, const Tensor& query) {
  Attention call{bias, dropout, false, scale, {seed.seed + index * 0x9e3779b97f4a7c15ull, seed.offset}};
  window.apply_to(&call, part.queries, part.keys, query);
  return call;
}

struct Packed {
  Tensor output;
  std::vector<Tensor> lse;  // for each part, [batch, heads, queries]
};

Packed forward(const std::vector<Part>& parts, const Tensor& query, const Tensor& key, const Tensor& value,
               const OptionalTensor& bias, double dropout, const Window& window,
               std::optional<double> scale) {
  std::vector<int64_t> shape = query.sizes().vec();
  shape.back() = value.size(-1);
  Packed result{at::zeros(shape, query.options()), {}};
  for (size_t index = 0; index < parts.size(); ++index) {
    const Part& part = parts[index];
    Attention call = call_for(part, index, bias, dropout, window, scale, seed_of_call(), query);
    auto [output, lse] = attend(call, part.query(query), part.key(key), part.key(value));
    part.query(result.output).copy_(output);
    result.lse.push_back(lse);
  }
  return result;
}

AttentionGradients backward(const std::vector<Part>& parts, const Tensor& grad, const Tensor& query,
                            const Tensor& key, const Tensor& value, const Tensor& output,
                            const std::vector<Tensor>& lse, const OptionalTensor& bias, bool bias_wanted,
                            double dropout, const Window& window, std::optional<double> scale, Seed seed) {
  AttentionGradients result{at::zeros(query.sizes(), query.options()), at::zeros(key.sizes(), key.options()),
                            at::zeros(value.sizes(), value.options()), Tensor()};
  for (size_t index = 0; index < parts.size(); ++index) {
    const Part& part = parts[index];
    Attention call = call_for(part, index, bias, dropout, window, scale, seed, query);
    AttentionGradients found = attend_backward(call, part.query(grad), part.query(query), part.key(key),
                                               part.key(value), part.query(output), lse[index], bias_wanted);
    part.query(result.query).copy_(found.query);
    part.key(result.key).copy_(found.key);
    part.key(result.value).copy_(found.value);
    if (bias_wanted) result.mask = found.mask;
  }
  return result;
}

Window flash_window(bool causal, std::optional<int64_t> left, std::optional<int64_t> right) {
  return {left.value_or(-1), causal ? 0 : right.value_or(-1), /*from_end=*/true};
}

// flash: packed sequences' lse is [heads, all queries]
std::vector<Tensor> flash_lse_parts(const std::vector<Part>& parts, const Tensor& lse) {
  std::vector<Tensor> cut;
  for (const Part& part : parts)
    cut.push_back(part.packed ? lse.narrow(1, part.first_query, part.queries).unsqueeze(0) : lse);
  return cut;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> flash_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& query_bounds,
    const OptionalTensor& key_bounds, int64_t, int64_t, double dropout, bool causal, bool,
    std::optional<double> scale, std::optional<int64_t> left, std::optional<int64_t> right,
    const OptionalTensor& used_keys, const OptionalTensor& alibi_slopes, const OptionalTensor& block_table,
    std::optional<int64_t>) {
  for (const OptionalTensor& option : {used_keys, alibi_slopes, block_table}) {
    TORCH_CHECK_NOT_IMPLEMENTED(!option || !option->defined(),
                                "seqused_k, alibi_slopes and block_table are not emulated");
  }
  std::vector<Part> parts = parts_of(query, key, query_bounds, key_bounds);
  Packed result =
      forward(parts, query, key, value, std::nullopt, dropout, flash_window(causal, left, right), scale);
  bool packed = query_bounds && query_bounds->defined();
  Tensor lse =
      packed ? at::zeros({query.size(-2), query.size(-3)}, query.options().dtype(at::kFloat)) : result.lse[0];
  std::vector<Tensor> cut = flash_lse_parts(parts, lse);
  for (size_t index = 0; packed && index < parts.size(); ++index) cut[index].copy_(result.lse[index]);
  return {result.output, lse, state_of(seed_of_call()), at::empty({0}, query.options().dtype(at::kLong)),
          at::empty({0}, query.options())};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& grad, const Tensor& query, const Tensor& key,
                                                  const Tensor& value, const Tensor& output,
                                                  const Tensor& lse, const Tensor& query_bounds,
                                                  const Tensor& key_bounds, int64_t, int64_t, double dropout,
                                                  bool causal, const Tensor& state, const Tensor&,
                                                  std::optional<double> scale, std::optional<int64_t> left,
                                                  std::optional<int64_t> right) {
  std::vector<Part> parts = parts_of(query, key, query_bounds, key_bounds);
  AttentionGradients found =
      backward(parts, grad, query, key, value, output, flash_lse_parts(parts, lse), std::nullopt, false,
               dropout, flash_window(causal, left, right), scale, dropout > 0 ? seed_of(state) : Seed());
  return {found.query, found.key, found.value};
}

// custom_mask_type: 1 causal from the first position, 2 from the last.
Window efficient_window(int64_t type, std::optional<int64_t> size) {
  return {size ? *size - 1 : -1, type ? 0 : -1, /*from_end=*/type == 2};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t> efficient_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& bias,
    const OptionalTensor& query_bounds, const OptionalTensor& key_bounds,
    std::optional<int64_t> longest_query, std::optional<int64_t> longest_key, double dropout,
    int64_t mask_type, bool with_lse, std::optional<double> scale, const OptionalTensor& key_lengths,
    std::optional<int64_t> window) {
  TORCH_CHECK_NOT_IMPLEMENTED(!key_lengths || !key_lengths->defined(), "seqlen_k is not emulated");
  std::vector<Part> parts = parts_of(query, key, query_bounds, key_bounds);
  Packed result =
      forward(parts, query, key, value, bias, dropout, efficient_window(mask_type, window), scale);
  bool packed = query_bounds && query_bounds->defined();
  int64_t queries = packed ? longest_query.value_or(query.size(1)) : query.size(1);
  int64_t keys = packed ? longest_key.value_or(key.size(1)) : key.size(1);
  int64_t rows = packed ? query_bounds->numel() - 1 : query.size(0);
  Tensor lse = at::zeros({rows, query.size(2), with_lse ? queries : 0}, query.options().dtype(at::kFloat));
  for (size_t index = 0; with_lse && index < parts.size(); ++index) {
    (packed ? lse.narrow(0, static_cast<int64_t>(index), 1).narrow(2, 0, parts[index].queries) : lse)
        .copy_(result.lse[index]);
  }
  Seed seed = seed_of_call();
  return {
      result.output, lse, number(static_cast<int64_t>(seed.seed)), number(static_cast<int64_t>(seed.offset)),
      queries,       keys};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
    const OptionalTensor& bias, const Tensor& output, const OptionalTensor& query_bounds,
    const OptionalTensor& key_bounds, int64_t, int64_t, const Tensor& lse, double dropout, const Tensor& seed,
    const Tensor& offset, int64_t mask_type, bool bias_wanted, std::optional<double> scale,
    std::optional<int64_t>, std::optional<int64_t> window, bool) {
  std::vector<Part> parts = parts_of(query, key, query_bounds, key_bounds);
  std::vector<Tensor> cut;
  for (size_t index = 0; index < parts.size(); ++index) {
    cut.push_back(parts[index].packed
                      ? lse.narrow(0, static_cast<int64_t>(index), 1).narrow(2, 0, parts[index].queries)
                      : lse);
  }
  Seed used;
  if (dropout > 0)
    used = {static_cast<uint64_t>(seed.item<int64_t>()), static_cast<uint64_t>(offset.item<int64_t>())};
  AttentionGradients found = backward(parts, grad, query, key, value, output, cut, bias, bias_wanted, dropout,
                                      efficient_window(mask_type, window), scale, used);
  return {found.query, found.key, found.value, found.mask};
}

}  // namespace

OwnKernels packed_attention_kernels() {
  return {{"_flash_attention_forward", host_kernel(flash_forward), /*random=*/true},
          {"_flash_attention_backward", host_kernel(flash_backward)},
          {"_efficient_attention_forward", host_kernel(efficient_forward), /*random=*/true},
          {"_efficient_attention_backward", host_kernel(efficient_backward)}};
}

}  // namespace operators
