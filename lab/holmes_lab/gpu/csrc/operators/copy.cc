// Copies. Within a device they are operators like others; between devices, and from and to the host, torch's
// own copy does what it does on a GPU (pinned memory, streams, what waits), which comes to cudaMemcpyAsync.

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy_native.h>
#include <ATen/ops/copy_native.h>

#include "own.h"

namespace operators {

namespace {

bool within_a_device(const Stack& stack, size_t begin) {
  std::optional<c10::Device> device;
  bool within = true;
  for (size_t index = begin; index < begin + 2; ++index) {
    each_tensor(stack[index], [&](const at::Tensor& tensor) {
      if (!device) device = tensor.device();
      within = within && tensor.device() == *device && tensor.layout() == c10::kStrided;
    });
  }
  return within && device && device->is_cuda();
}

class Copy : public Operator {
 public:
  using Operator::Operator;
  void call(Stack* stack) override {
    const size_t begin = stack->size() - 3;
    if (within_a_device(*stack, begin)) return Operator::call(stack);
    at::Tensor target = (*stack)[begin].toTensor();
    at::native::copy_(target, (*stack)[begin + 1].toTensor(), (*stack)[begin + 2].toBool());
    stack->resize(begin);
    stack->emplace_back(std::move(target));
  }
};

class CopyList : public Operator {
 public:
  using Operator::Operator;
  void call(Stack* stack) override {
    const size_t begin = stack->size() - 3;
    if (within_a_device(*stack, begin)) return Operator::call(stack);
    std::vector<at::Tensor> targets = (*stack)[begin].toTensorVector(),
                            sources = (*stack)[begin + 1].toTensorVector();
    at::native::foreach_tensor_copy_list_kernel_slow_(targets, sources, (*stack)[begin + 2].toBool());
    stack->resize(begin);
  }
};

}  // namespace

HostParts copy_parts() { return {{"copy_", make<Copy>}, {"_foreach_copy_", make<CopyList>}}; }

}  // namespace operators
