// Operators whose result the host must know (item, nonzero, unique, equal ...): the host waits for the
// stream, as it does on a GPU, and runs the CPU kernel itself.

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include "operators.h"

namespace operators {

void run_now(const Operator& op, Stack* stack, c10::Device device) {
  c10::cuda::stream_synchronize(c10::cuda::getCurrentCUDAStream(device.index()).stream());
  const size_t begin = stack->size() - op.parameters.size();
  Aliases aliases;
  Stack arguments;
  std::vector<std::pair<at::Tensor, at::Tensor>> written;  // a tensor of the device, its stand-in on the host
  for (size_t index = 0; index < op.parameters.size(); ++index) {
    bool resized = op.out_variant && op.parameters[index].written;
    arguments.push_back(with_tensors((*stack)[begin + index], [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.layout() != c10::kStrided) {
        at::Tensor host = sparse_on_host(tensor, &aliases);
        if (op.parameters[index].written) written.emplace_back(tensor, host);
        return host;
      }
      if (!resized) return tensor.defined() && tensor.is_cpu() ? tensor : aliases.of(tensor);
      written.emplace_back(tensor,
                           at::Tensor(at::detail::empty_cpu({0}, tensor.options().device(c10::kCPU))));
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
    if (tensor.layout() != c10::kStrided) {
      put_sparse(tensor, stand_in);
      continue;
    }
    at::native::resize_output(tensor, stand_in.sizes());
    at::Tensor alias = Aliases().of(tensor);
    HostKernels guard;
    alias.copy_(stand_in);
  }
  size_t first = arguments.size() - op.returns.size();
  std::vector<c10::IValue> results;
  for (size_t index = 0; index < op.returns.size(); ++index) {
    if (op.returns[index] != kNew) {
      results.push_back((*stack)[begin + op.returns[index]]);
    } else {
      results.push_back(with_tensors(arguments[first + index], [&](const at::Tensor& result) {
        bool sparse = result.defined() && result.layout() != c10::kStrided;
        return sparse ? sparse_on_device(result, device) : on_device(result, device);
      }));
    }
  }
  stack->resize(begin);
  for (c10::IValue& result : results) stack->push_back(std::move(result));
}

}  // namespace operators
