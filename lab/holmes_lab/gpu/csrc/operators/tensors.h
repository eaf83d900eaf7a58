// Tensors of the device as CPU tensors over the same memory, and back.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/FunctionRef.h>

#include <utility>

namespace operators {

// Description of a tensor: sizes, strides and type.
struct Look {
  bool defined = false;
  c10::ScalarType dtype = c10::ScalarType::Float;
  c10::DimVector sizes, strides;
  bool conjugate = false, negative = false;
};
Look look(const at::Tensor& tensor);
int64_t span_bytes(const Look& look);  // from its first to its last element

// CPU tensors that own no memory; the same tensor or storage gives the same alias or storage.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& tensor);
  at::Tensor of_memory(void* data, const Look& look);

 private:
  c10::SmallVector<std::pair<const c10::TensorImpl*, at::Tensor>, 8> tensors_;
  c10::SmallVector<std::pair<const c10::StorageImpl*, c10::Storage>, 8> storages_;
};

at::Tensor tensor_over(c10::Storage storage, const Look& look);

// The value with each tensor in it replaced by change(tensor), and each device by the CPU.
c10::IValue with_tensors(const c10::IValue& value, c10::function_ref<at::Tensor(const at::Tensor&)> change);
// Calls visit for each tensor in the value, defined or not.
void each_tensor(const c10::IValue& value, c10::function_ref<void(const at::Tensor&)> visit);

// A new tensor of a device with the content of a CPU tensor; only while nothing runs on the current stream.
at::Tensor on_device(const at::Tensor& host, c10::Device device);

// sparse.cc. Sparse tensors; their parts are aliases on the host, new tensors on the device.
at::Tensor sparse_on_host(const at::Tensor& tensor, Aliases* aliases);
at::Tensor sparse_on_device(const at::Tensor& host, c10::Device device);
void put_sparse(const at::Tensor& target, const at::Tensor& host);

}  // namespace operators
