// Operators whose result the host must know (item, nonzero, unique, equal ...): the host waits for the stream, as it
// does on a GPU, and runs the CPU kernel itself.

#include <ATen/core/Tensor.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <cstring>

#include "operators.h"

namespace operators {

namespace {

// A new tensor of the device with what a CPU tensor holds. Nothing else uses its memory yet: its stream has run dry.
at::Tensor on_device(const at::Tensor& result, c10::Device device) {
  if (!result.defined()) return result;
  Output like = look(result);
  at::Tensor made(at::detail::empty_strided_cuda(like.sizes, like.strides, like.dtype, device));
  if (like.conjugate) made._set_conj(true);
  if (like.negative) made._set_neg(true);
  int64_t bytes = span_bytes(like);
  if (bytes) memcpy(made.mutable_data_ptr(), result.const_data_ptr(), bytes);
  return made;
}

}  // namespace

void run_now(const Operator& op, Stack* stack, c10::Device device) {
  c10::cuda::stream_synchronize(c10::cuda::getCurrentCUDAStream(device.index()).stream());
  const size_t begin = stack->size() - op.parameters.size();
  Aliases aliases;
  Stack arguments;
  std::vector<std::pair<at::Tensor, at::Tensor>> written;  // of an out= variant: a tensor of the device, its stand-in
  for (size_t index = 0; index < op.parameters.size(); ++index) {
    bool resized = op.out_variant && op.parameters[index].written;
    arguments.push_back(with_tensors((*stack)[begin + index], [&](const at::Tensor& tensor) {
      if (!resized) return tensor.defined() && tensor.is_cpu() ? tensor : aliases.of(tensor);
      written.emplace_back(tensor, at::empty({0}, tensor.options().device(c10::kCPU)));
      return written.back().second;
    }));
  }
  Seed seed;
  if (op.random) seed = take_seed(op.generator >= 0 ? (*stack)[begin + op.generator] : c10::IValue(), device);
  {
    HostKernels guard;
    op.run(&arguments, seed, /*into_outputs=*/false);
  }
  for (auto& [tensor, stand_in] : written) {
    at::native::resize_output(tensor, stand_in.sizes());
    at::Tensor alias = Aliases().of(tensor);
    HostKernels guard;
    alias.copy_(stand_in);
  }
  size_t first = arguments.size() - op.returns.size();
  std::vector<c10::IValue> results;
  for (size_t index = 0; index < op.returns.size(); ++index) {
    if (op.returns[index].argument >= 0) {
      results.push_back((*stack)[begin + op.returns[index].argument]);
    } else {
      results.push_back(with_tensors(arguments[first + index], [&](const at::Tensor& result) { return on_device(result, device); }));
    }
  }
  stack->resize(begin);
  for (c10::IValue& result : results) stack->push_back(std::move(result));
}

}  // namespace operators
