// Sparse tensors: their operators that have CUDA kernels of their own wait for the stream and run on the
// host, because the number of elements of their results depends on values.

#include <ATen/ATen.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/native/SparseTensorUtils.h>
#include <c10/cuda/CUDAGuard.h>

#include "own.h"

namespace operators {

namespace {

using at::Tensor;
using Change = c10::function_ref<Tensor(const Tensor&)>;

// A sparse tensor like `from` whose parts are change(part), on a device.
Tensor with_parts(const Tensor& from, c10::Device device, Change change) {
  at::AutoDispatchBelowAutograd no_gradients;
  at::TensorOptions options = from.options().device(device);
  if (from.layout() == c10::kSparse) {
    return at::_sparse_coo_tensor_with_dims_and_tensors(from.sparse_dim(), from.dense_dim(), from.sizes(),
                                                        change(from._indices()), change(from._values()),
                                                        options, from.is_coalesced());
  }
  auto [compressed, plain] = at::sparse_csr::getCompressedPlainIndices(from);
  return at::_sparse_compressed_tensor_unsafe(change(compressed), change(plain), change(from.values()),
                                              from.sizes(), options);
}

}  // namespace

Tensor sparse_on_host(const Tensor& tensor, Aliases* aliases) {
  return with_parts(tensor, c10::kCPU, [&](const Tensor& part) { return aliases->of(part); });
}

Tensor sparse_on_device(const Tensor& tensor, c10::Device device) {
  return with_parts(tensor, device, [&](const Tensor& part) { return on_device(part, device); });
}

void put_sparse(const Tensor& target, const Tensor& host) {
  at::AutoDispatchBelowAutograd no_gradients;
  Tensor made = sparse_on_device(host, target.device());
  if (target.layout() == c10::kSparse) {
    auto* inside = at::sparse::get_sparse_impl(target);
    inside->raw_resize_(made.sparse_dim(), made.dense_dim(), made.sizes());
    inside->set_indices_and_values_unsafe(made._indices(), made._values());
    inside->set_coalesced(made.is_coalesced());
    return;
  }
  auto [compressed, plain] = at::sparse_csr::getCompressedPlainIndices(made);
  at::sparse_csr::get_sparse_csr_impl(target)->set_member_tensors(compressed, plain, made.values(),
                                                                  made.sizes());
}

namespace {

class Sparse : public Operator {
 public:
  explicit Sparse(const c10::OperatorHandle& handle, c10::DispatchKey key) : Operator(handle) {
    host_key = key;
  }
  void call(Stack* stack) override {
    std::optional<c10::Device> device;
    for (size_t index = stack->size() - parameters.size(); index < stack->size(); ++index) {
      each_tensor((*stack)[index], [&](const Tensor& tensor) {
        if (tensor.defined() && tensor.is_cuda()) device = tensor.device();
      });
    }
    c10::cuda::CUDAGuard guard(*device);
    run_now(*this, stack, *device);
  }
};

// Operators with CUDA kernels in torch; the others work on a sparse tensor's parts.
const char* const kCoordinates[] = {
    "_coalesce",
    "add.out",
    "mul.out",
    "addmm",
    "addmm.out",
    "addmm_",
    "bmm",
    "bmm.out",
    "hspmm",
    "hspmm.out",
    "sspaddmm.out",
    "_sparse_softmax",
    "_sparse_softmax_backward_data",
    "_sparse_log_softmax",
    "_sparse_log_softmax_backward_data",
    "_sparse_sparse_matmul",
    "_sparse_sum_backward",
    "_sparse_mask_projection",
    "sparse_mask",
    "_to_sparse_csr",
    "_to_sparse_csc",
    "_to_sparse_bsr",
    "_to_sparse_bsc",
    "norm.ScalarOpt_dim",
};
const char* const kCompressed[] = {
    "add.out",
    "mul.out",
    "addmm.out",
    "addmv.out",
    "mm",
    "mm.out",
    "_sparse_csr_sum.dim_dtype",
    "_sparse_csr_prod.dim_dtype",
    "sparse_sampled_addmm",
    "sparse_sampled_addmm.out",
    "triangular_solve.X",
    "sum",
    "sum.dim_IntList",
    "sparse_mask",
    "_to_dense",
    "_to_sparse",
    "_to_sparse.sparse_dim",
    "_to_sparse_csr",
    "_to_sparse_csc",
    "_to_sparse_bsr",
    "_to_sparse_bsc",
};

void add_for(c10::DispatchKey key, c10::DispatchKey host_key, c10::ArrayRef<const char*> names,
             std::vector<OfKey>* all) {
  for (const std::string name : names) {
    const size_t dot = name.find('.');
    auto handle = c10::Dispatcher::singleton().findSchema(
        {"aten::" + name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)});
    if (!handle || !handle->hasComputedKernelForDispatchKey(host_key)) continue;
    all->push_back({key, name, std::make_unique<Sparse>(*handle, host_key)});
  }
}

}  // namespace

std::vector<OfKey> sparse_operators() {
  std::vector<OfKey> all;
  add_for(c10::DispatchKey::SparseCUDA, c10::DispatchKey::SparseCPU, kCoordinates, &all);
  add_for(c10::DispatchKey::SparseCsrCUDA, c10::DispatchKey::SparseCsrCPU, kCompressed, &all);
  return all;
}

}  // namespace operators
