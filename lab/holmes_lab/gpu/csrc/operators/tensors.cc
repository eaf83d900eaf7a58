// CPU tensors over memory that they do not own.

#include <ATen/cuda/EmptyTensor.h>

#include <cstring>

#include "tensors.h"

namespace operators {

namespace {

constexpr size_t kRemembered =
    16;  // tensors of a call; longer ones are lists, whose tensors are all different

void no_delete(void*) {}

c10::Storage storage_over(void* data, size_t bytes) {
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(bytes),
      c10::DataPtr(data, data, &no_delete, c10::Device(c10::kCPU)), nullptr,
      /*resizable=*/false);
}

}  // namespace

at::Tensor tensor_over(c10::Storage storage, const Look& look) {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(look.dtype));
  c10::TensorImpl* inside = made.unsafeGetTensorImpl();
  inside->set_sizes_and_strides(look.sizes, look.strides);
  if (look.conjugate) inside->_set_conj(true);
  if (look.negative) inside->_set_neg(true);
  return made;
}

at::Tensor Aliases::of(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const c10::TensorImpl* source = tensor.unsafeGetTensorImpl();
  for (auto& [known, alias] : tensors_) {
    if (known == source) return alias;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == c10::kStrided && source->has_storage(),
                              "emulated GPU: a tensor of layout ", tensor.layout(), " is not emulated here");
  const c10::StorageImpl* memory = tensor.storage().unsafeGetStorageImpl();
  c10::Storage storage;
  for (auto& [known, alias] : storages_) {
    if (known == memory) storage = alias;
  }
  if (!storage) {
    storage = storage_over(const_cast<void*>(memory->data()), memory->nbytes());
    if (storages_.size() < kRemembered) storages_.emplace_back(memory, storage);
  }
  at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), source->dtype());
  c10::TensorImpl* inside = alias.unsafeGetTensorImpl();
  inside->set_sizes_and_strides(source->sizes(), source->strides(), source->storage_offset());
  if (tensor.is_conj()) inside->_set_conj(true);
  if (tensor.is_neg()) inside->_set_neg(true);
  if (source->is_wrapped_number()) inside->set_wrapped_number(true);
  if (tensors_.size() < kRemembered) tensors_.emplace_back(source, alias);
  return alias;
}

at::Tensor Aliases::of_memory(void* data, const Look& look) {
  return tensor_over(storage_over(data, span_bytes(look)), look);
}

c10::IValue with_tensors(const c10::IValue& value, c10::function_ref<at::Tensor(const at::Tensor&)> change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    const auto& all = value.toListRef();
    changed.reserve(all.size());
    for (const c10::IValue& one : all) changed.push_back(change(one.toTensor()));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const c10::IValue& one : value.toListRef()) {
      changed.push_back(one.isNone() ? std::nullopt : std::optional<at::Tensor>(change(one.toTensor())));
    }
    return changed;
  }
  if (value.isDevice()) return c10::Device(c10::kCPU);
  return value;
}

void each_tensor(const c10::IValue& value, c10::function_ref<void(const at::Tensor&)> visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const c10::IValue& one : value.toListRef()) {
      if (!one.isNone()) visit(one.toTensor());
    }
  }
}

int64_t span_bytes(const Look& look) {
  int64_t last = 0;
  for (size_t dim = 0; dim < look.sizes.size(); ++dim) {
    if (look.sizes[dim] == 0) return 0;
    last += (look.sizes[dim] - 1) * look.strides[dim];
  }
  return (last + 1) * static_cast<int64_t>(c10::elementSize(look.dtype));
}

Look look(const at::Tensor& tensor) {
  Look found;
  if (!tensor.defined()) return found;
  found.defined = true;
  found.dtype = tensor.scalar_type();
  found.sizes = c10::DimVector(tensor.sizes());
  found.strides = c10::DimVector(tensor.strides());
  found.conjugate = tensor.is_conj();
  found.negative = tensor.is_neg();
  return found;
}

at::Tensor on_device(const at::Tensor& host, c10::Device device) {
  if (!host.defined()) return host;
  Look like = look(host);
  at::Tensor made(at::detail::empty_strided_cuda(like.sizes, like.strides, like.dtype, device));
  if (like.conjugate) made._set_conj(true);
  if (like.negative) made._set_neg(true);
  int64_t bytes = span_bytes(like);
  if (bytes) memcpy(made.mutable_data_ptr(), host.const_data_ptr(), bytes);
  return made;
}

}  // namespace operators
