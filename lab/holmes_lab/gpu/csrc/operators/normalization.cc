// Normalizations that only CUDA has as operators of their own: the derivative of RMS norm, synchronized batch
// norm.

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include "own.h"

namespace operators {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

bool given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

std::vector<int64_t> last_dimensions(const Tensor& input, at::IntArrayRef normalized_shape) {
  std::vector<int64_t> dimensions;
  for (int64_t dim = input.dim() - static_cast<int64_t>(normalized_shape.size()); dim < input.dim(); ++dim) {
    dimensions.push_back(dim);
  }
  return dimensions;
}

// The steps of the derivatives of at::_fused_rms_norm's parts on the CPU (x * rsqrt(mean(x^2) + eps) *
// weight), in their order: the same bits.
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad_out, const Tensor& input,
                                             at::IntArrayRef normalized_shape, const Tensor& rstd,
                                             const OptionalTensor& weight, std::array<bool, 2> wanted) {
  at::ScalarType type = at::toOpMathType(input.scalar_type());
  Tensor grad = grad_out.to(type), x = input.to(type), grad_input, grad_weight;
  std::vector<int64_t> dimensions = last_dimensions(input, normalized_shape);
  if (given(weight)) {
    if (wanted[1]) {
      std::vector<int64_t> leading;
      for (int64_t dim = 0; dim < dimensions.front(); ++dim) leading.push_back(dim);
      grad_weight = grad * (x * rstd);
      if (!leading.empty()) grad_weight = grad_weight.sum(leading, /*keepdim=*/true);
      grad_weight = grad_weight.view(normalized_shape).to(weight->scalar_type());
    }
    grad = grad * *weight;
  }
  if (wanted[0]) {
    int64_t count = 1;
    for (int64_t size : normalized_shape) count *= size;
    Tensor grad_rstd = (grad * x).sum(dimensions, /*keepdim=*/true);
    Tensor grad_mean = -0.5 * grad_rstd * rstd.pow(3);
    Tensor through_mean = (grad_mean.expand(x.sizes()) / count) * (2 * x.pow(1));
    grad_input = (grad * rstd + through_mean).to(input.scalar_type());
  }
  return {grad_input, grad_weight};
}

// Synchronized batch norm. All but the channels (dimension 1) is reduced.
std::vector<int64_t> all_but_channels(const Tensor& input) {
  std::vector<int64_t> dimensions;
  for (int64_t dim = 0; dim < input.dim(); ++dim) {
    if (dim != 1) dimensions.push_back(dim);
  }
  return dimensions;
}

Tensor by_channel(const Tensor& values, const Tensor& input) {
  std::vector<int64_t> shape(input.dim(), 1);
  shape[1] = -1;
  return values.view(shape);
}

std::tuple<Tensor, Tensor> mean_and_variance(const Tensor& input) {
  Tensor wide = input.to(at::toOpMathType(input.scalar_type()));
  std::vector<int64_t> dimensions = all_but_channels(input);
  return {wide.mean(dimensions), wide.var(dimensions, /*unbiased=*/false)};
}

std::tuple<Tensor, Tensor> batch_norm_stats(const Tensor& input, double eps) {
  auto [mean, variance] = mean_and_variance(input);
  return {mean, (variance + eps).rsqrt()};
}

void update(const OptionalTensor& running, const Tensor& value, double momentum) {
  if (given(running)) running->mul_(1 - momentum).add_(value, momentum);
}

// Of several parts' means and standard deviations [parts, channels] and counts [parts].
std::tuple<Tensor, Tensor> gather_stats_with_counts(const Tensor& input, const Tensor& mean,
                                                    const Tensor& invstd, const OptionalTensor& running_mean,
                                                    const OptionalTensor& running_var, double momentum,
                                                    double eps, const Tensor& counts) {
  Tensor shares = counts.to(mean.scalar_type()).view({-1, 1}), all = shares.sum();
  Tensor together = (mean * shares).sum(0) / all;
  Tensor squares = ((invstd.pow(-2) - eps) + (mean - together).pow(2)) * shares;
  Tensor variance = squares.sum(0) / all;
  update(running_mean, together, momentum);
  update(running_var, squares.sum(0) / (all - 1), momentum);
  return {together, (variance + eps).rsqrt()};
}

std::tuple<Tensor, Tensor> batch_norm_gather_stats(const Tensor& input, const Tensor& mean,
                                                   const Tensor& invstd, const OptionalTensor& running_mean,
                                                   const OptionalTensor& running_var, double momentum,
                                                   double eps, int64_t count) {
  Tensor counts = at::full({mean.size(0)}, count, mean.options());
  return gather_stats_with_counts(input, mean, invstd, running_mean, running_var, momentum, eps, counts);
}

Tensor batch_norm_elemt(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                        const Tensor& mean, const Tensor& invstd, double) {
  Tensor output = (input.to(mean.scalar_type()) - by_channel(mean, input)) * by_channel(invstd, input);
  if (given(weight)) output = output * by_channel(*weight, input);
  if (given(bias)) output = output + by_channel(*bias, input);
  return output.to(input.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward_reduce(
    const Tensor& grad_out, const Tensor& input, const Tensor& mean, const Tensor& invstd,
    const OptionalTensor& weight, bool input_wanted, bool weight_wanted, bool bias_wanted) {
  std::vector<int64_t> dimensions = all_but_channels(input);
  Tensor grad = grad_out.to(mean.scalar_type()),
         centered = input.to(mean.scalar_type()) - by_channel(mean, input);
  Tensor sum_dy = grad.sum(dimensions), sum_dy_xmu = (grad * centered).sum(dimensions), grad_weight,
         grad_bias;
  at::ScalarType type = given(weight) ? weight->scalar_type() : mean.scalar_type();
  if (weight_wanted) grad_weight = (sum_dy_xmu * invstd).to(type);
  if (bias_wanted) grad_bias = sum_dy.to(type);
  return {input_wanted ? sum_dy : Tensor(), input_wanted ? sum_dy_xmu : Tensor(), grad_weight, grad_bias};
}

Tensor batch_norm_backward_elemt(const Tensor& grad_out, const Tensor& input, const Tensor& mean,
                                 const Tensor& invstd, const OptionalTensor& weight, const Tensor& sum_dy,
                                 const Tensor& sum_dy_xmu, const Tensor& count) {
  Tensor all = count.sum();
  Tensor centered = input.to(mean.scalar_type()) - by_channel(mean, input);
  Tensor grad = grad_out.to(mean.scalar_type()) - by_channel(sum_dy / all, input) -
                centered * by_channel(invstd.pow(2) * sum_dy_xmu / all, input);
  grad = grad * by_channel(given(weight) ? invstd * *weight : invstd, input);
  return grad.to(input.scalar_type());
}

std::tuple<Tensor, Tensor> batch_norm_update_stats(const Tensor& input, const OptionalTensor& running_mean,
                                                   const OptionalTensor& running_var, double momentum) {
  auto [mean, variance] = mean_and_variance(input);
  double count = static_cast<double>(input.numel()) / static_cast<double>(input.size(1));
  update(running_mean, mean, momentum);
  update(running_var, variance * (count / (count - 1)), momentum);
  return {mean, variance};
}

}  // namespace

OwnKernels normalization_kernels() {
  return {{"_fused_rms_norm_backward", host_kernel(rms_norm_backward)},
          {"batch_norm_stats", host_kernel(batch_norm_stats)},
          {"batch_norm_gather_stats", host_kernel(batch_norm_gather_stats)},
          {"batch_norm_gather_stats_with_counts", host_kernel(gather_stats_with_counts)},
          {"batch_norm_elemt", host_kernel(batch_norm_elemt)},
          {"batch_norm_backward_reduce", host_kernel(batch_norm_backward_reduce)},
          {"batch_norm_backward_elemt", host_kernel(batch_norm_backward_elemt)},
          {"batch_norm_update_stats", host_kernel(batch_norm_update_stats)}};
}

}  // namespace operators
