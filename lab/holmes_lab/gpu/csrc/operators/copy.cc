// Copies. Within a device they are operators like others; between devices, and from and to the host, torch's
// own copy works as on a GPU (pinned memory, streams, waits), and ends in cudaMemcpyAsync.

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

// torch skips the copy of a tensor to itself on every device: no kernel reads or writes it (copy_impl in
// ATen/native/Copy.cpp).
bool same_data(const at::Tensor& target, const at::Tensor& source) {
  return target.is_alias_of(source) && target.storage_offset() == source.storage_offset() &&
         target.strides() == source.strides() && target.sizes() == source.sizes() &&
         target.scalar_type() == source.scalar_type() && target.is_conj() == source.is_conj() &&
         target.is_neg() == source.is_neg();
}

class Copy : public Operator {
 public:
  using Operator::Operator;
  void call(Stack* stack) override {
    const size_t begin = stack->size() - 3;
    at::Tensor target = (*stack)[begin].toTensor(), source = (*stack)[begin + 1].toTensor();
    if (within_a_device(*stack, begin) && !same_data(target, source)) return Operator::call(stack);
    at::native::copy_(target, source, (*stack)[begin + 2].toBool());  // nothing, where the data are the same
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
