// cuDNN's operators that torch calls by name, by the CPU's operators for the same.

#include <ATen/ATen.h>

#include "own.h"

namespace operators {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Sizes = c10::SymIntArrayRef;

constexpr int64_t kBilinear = 0, kZeros = 0;  // GridSamplerInterpolation, GridSamplerPadding

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm(const Tensor& input, const Tensor& weight,
                                                      const OptionalTensor& bias,
                                                      const OptionalTensor& running_mean,
                                                      const OptionalTensor& running_var, bool training,
                                                      double momentum, double epsilon) {
  auto [output, mean, invstd] =
      at::native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, epsilon);
  return {output, mean, invstd, at::empty({0}, input.options().dtype(at::kByte))};
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_backward(
    const Tensor& input, const Tensor& grad_output, const Tensor& weight, const OptionalTensor& running_mean,
    const OptionalTensor& running_var, const OptionalTensor& mean, const OptionalTensor& invstd,
    double epsilon, const Tensor&) {
  return at::native_batch_norm_backward(grad_output, input, weight, running_mean, running_var, mean, invstd,
                                        /*train=*/true, epsilon, {true, true, true});
}

Tensor grid_sampler(const Tensor& self, const Tensor& grid) {
  return at::grid_sampler_2d(self, grid, kBilinear, kZeros, /*align_corners=*/true);
}

std::tuple<Tensor, Tensor> grid_sampler_backward(const Tensor& self, const Tensor& grid, const Tensor& grad) {
  return at::grid_sampler_2d_backward(grad, self, grid, kBilinear, kZeros, /*align_corners=*/true,
                                      {true, true});
}

Tensor affine_grid_generator(const Tensor& theta, int64_t n, int64_t c, int64_t h, int64_t w) {
  return at::affine_grid_generator(theta, {n, c, h, w}, /*align_corners=*/true);
}

Tensor affine_grid_generator_backward(const Tensor& grad, int64_t n, int64_t c, int64_t h, int64_t w) {
  return at::affine_grid_generator_backward(grad, {n, c, h, w}, /*align_corners=*/true);
}

Tensor convolution(const Tensor& self, const Tensor& weight, Sizes padding, Sizes stride, Sizes dilation,
                   c10::SymInt groups, bool, bool, bool) {
  std::vector<c10::SymInt> none(padding.size(), 0);
  return at::convolution_symint(self, weight, {}, stride, padding, dilation, /*transposed=*/false, none,
                                groups);
}

Tensor convolution_transpose(const Tensor& self, const Tensor& weight, Sizes padding, Sizes output_padding,
                             Sizes stride, Sizes dilation, c10::SymInt groups, bool, bool, bool) {
  return at::convolution_symint(self, weight, {}, stride, padding, dilation, /*transposed=*/true,
                                output_padding, groups);
}

Tensor convolution_relu(const Tensor& self, const Tensor& weight, const OptionalTensor& bias, Sizes stride,
                        Sizes padding, Sizes dilation, c10::SymInt groups) {
  std::vector<c10::SymInt> none(padding.size(), 0);
  return at::convolution_symint(self, weight, bias, stride, padding, dilation, /*transposed=*/false, none,
                                groups)
      .relu();
}

Tensor convolution_add_relu(const Tensor& self, const Tensor& weight, const Tensor& z,
                            const std::optional<at::Scalar>& alpha, const OptionalTensor& bias, Sizes stride,
                            Sizes padding, Sizes dilation, c10::SymInt groups) {
  std::vector<c10::SymInt> none(padding.size(), 0);
  Tensor sum = at::convolution_symint(self, weight, bias, stride, padding, dilation, /*transposed=*/false,
                                      none, groups);
  return sum.add(z, alpha.value_or(1)).relu();
}

Tensor depthwise(const Tensor& self, const Tensor& weight, Sizes, const OptionalTensor& bias, Sizes stride,
                 Sizes padding, Sizes dilation) {
  std::vector<c10::SymInt> none(padding.size(), 0);
  return at::convolution_symint(self, weight, bias, stride, padding, dilation, /*transposed=*/false, none,
                                self.sym_size(1));
}

// Whether cuDNN's CTC loss fits: it is not here.
class Never : public Operator {
 public:
  using Operator::Operator;
  void call(Stack* stack) override {
    stack->resize(stack->size() - parameters.size());
    stack->emplace_back(false);
  }
};

}  // namespace

OwnKernels cudnn_kernels() {
  return {{"cudnn_batch_norm", host_kernel(batch_norm)},
          {"cudnn_batch_norm_backward", host_kernel(batch_norm_backward)},
          {"cudnn_grid_sampler", host_kernel(grid_sampler)},
          {"cudnn_grid_sampler_backward", host_kernel(grid_sampler_backward)},
          {"cudnn_affine_grid_generator", host_kernel(affine_grid_generator)},
          {"cudnn_affine_grid_generator_backward", host_kernel(affine_grid_generator_backward)},
          {"cudnn_convolution", host_kernel(convolution)},
          {"cudnn_convolution_transpose", host_kernel(convolution_transpose)},
          {"cudnn_convolution_relu", host_kernel(convolution_relu)},
          {"cudnn_convolution_add_relu", host_kernel(convolution_add_relu)},
          {"_conv_depthwise2d", host_kernel(depthwise)},
          {"conv_depthwise3d", host_kernel(depthwise)}};
}

HostParts cudnn_parts() {
  return {{"_use_cudnn_ctc_loss", make<Never>},
          {"_use_cudnn_ctc_loss.Tensor", make<Never>},
          {"_use_miopen_ctc_loss", make<Never>},
          {"_use_miopen_ctc_loss.Tensor", make<Never>}};
}

}  // namespace operators
