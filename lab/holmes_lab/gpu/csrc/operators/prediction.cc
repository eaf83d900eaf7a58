// Description of a call's outputs, computed on the host without the values of its tensors.
//
//     structured operators   torch's own Meta kernel (C++)
//     all others             one run of the CPU kernel on scratch memory: zeros; ones where those are refused
//
// The result is kept under the description of the arguments.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/util/irange.h>

#include <stdlib.h>

#include "operators.h"

namespace operators {

namespace {

constexpr size_t kRemembered = 4096;  // calls of one operator

// Tensors that look like given ones; the same one for the same one.
class StandIns {
 public:
  at::Tensor of(const at::Tensor& tensor, c10::function_ref<at::Tensor(const at::Tensor&)> make) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    for (auto& [known, made] : made_) {
      if (known == tensor.unsafeGetTensorImpl()) return made;
    }
    at::Tensor made = make(tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
      made.unsafeGetTensorImpl()->set_wrapped_number(true);
    if (made_.size() < 16) made_.emplace_back(tensor.unsafeGetTensorImpl(), made);
    return made;
  }

 private:
  c10::SmallVector<std::pair<const c10::TensorImpl*, at::Tensor>, 8> made_;
};

at::Tensor on_meta(const at::Tensor& tensor) {
  at::Tensor made(at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

enum class Fill { kZeros, kFloatOnes, kOnes };

at::Tensor on_scratch(const at::Tensor& tensor, Fill fill) {
  Look like = look(tensor);
  size_t bytes = span_bytes(like);
  void* memory = calloc(bytes ? bytes : 1, 1);  // large ones: pages that are not there until they are written
  TORCH_CHECK(memory, "emulated GPU: no memory for ", bytes, " bytes");
  c10::Storage storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(bytes),
      c10::DataPtr(memory, memory, &free, c10::Device(c10::kCPU)), nullptr, /*resizable=*/false);
  bool integral = c10::isIntegralType(like.dtype, /*includeBool=*/true);
  if (fill == Fill::kOnes || (fill == Fill::kFloatOnes && !integral)) {
    Look flat;
    flat.dtype = like.dtype;
    flat.sizes = {static_cast<int64_t>(bytes / c10::elementSize(like.dtype))};
    flat.strides = {1};
    tensor_over(storage, flat).fill_(1);
  }
  return tensor_over(std::move(storage), like);
}

// Takes the results from the top of `results`, and the sizes of written tensors from `written`.
Prediction read(const Operator& op, const Stack& results, const Stack& arguments) {
  Prediction prediction;
  size_t first = results.size() - op.returns.size();
  for (size_t index = 0; index < op.returns.size(); ++index) {
    if (op.returns[index] != kNew) continue;
    const c10::IValue& result = results[first + index];
    if (result.isTensorList()) {
      prediction.lengths.push_back(static_cast<int>(result.toListRef().size()));
    } else if (result.isTensor()) {
      prediction.lengths.push_back(kOne);
    } else {
      prediction.lengths.push_back(kValue);
      prediction.values.push_back(result);
    }
    each_tensor(result, [&](const at::Tensor& tensor) { prediction.outputs.push_back(look(tensor)); });
  }
  if (op.out_variant) {
    for (size_t index = 0; index < op.parameters.size(); ++index) {
      if (!op.parameters[index].written) continue;
      each_tensor(arguments[index], [&](const at::Tensor& tensor) {
        prediction.resized.push_back(c10::DimVector(tensor.sizes()));
      });
    }
  }
  return prediction;
}

Prediction by_meta(const Operator& op, const Stack& stack, size_t begin) {
  StandIns stand_ins;
  Stack arguments;
  for (size_t index = begin; index < stack.size(); ++index) {
    const c10::IValue& value = stack[index];
    if (value.isDevice()) {
      arguments.emplace_back(c10::Device(c10::kMeta));
    } else if (value.isGenerator()) {
      arguments.emplace_back();
    } else {
      arguments.push_back(
          with_tensors(value, [&](const at::Tensor& tensor) { return stand_ins.of(tensor, on_meta); }));
    }
  }
  Stack results = arguments;
  HostKernels guard;
  (*op.meta)(&results);
  return read(op, results, arguments);
}

// Throws the exception that the CPU kernel throws on these values.
Prediction by_scratch(const Operator& op, const Stack& stack, size_t begin, Fill fill) {
  HostKernels guard;
  StandIns stand_ins;
  Stack arguments;
  for (size_t index = begin; index < stack.size(); ++index) {
    arguments.push_back(with_tensors(stack[index], [&](const at::Tensor& tensor) {
      return stand_ins.of(tensor, [&](const at::Tensor& like) { return on_scratch(like, fill); });
    }));
  }
  if (op.out_variant) {  // its memory can grow
    for (size_t index = 0; index < op.parameters.size(); ++index) {
      if (!op.parameters[index].written) continue;
      arguments[index] = with_tensors(arguments[index], [](const at::Tensor& tensor) {
        return at::Tensor(
            at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
      });
    }
  }
  Stack results = arguments;
  op.run(&results, Seed{1, 0}, /*into_outputs=*/false);
  return read(op, results, arguments);
}

std::unordered_map<std::string, MetaKernel>& meta_kernels() {
  static auto* kernels = new std::unordered_map<std::string, MetaKernel>;
  return *kernels;
}

// Where torch's dispatcher gives its kernels away (since 2.10).
template <class Handle>
concept GivesKernels =
    requires(const Handle& handle) { handle.getComputedKernelForDispatchKey(c10::DispatchKey::Meta); };

template <class Handle>
void remember(const Handle& handle) {
  if constexpr (GivesKernels<Handle>) {
    auto kernel = handle.getComputedKernelForDispatchKey(c10::DispatchKey::Meta);
    meta_kernels()[c10::toString(handle.operator_name())] = [handle, kernel](Stack* stack) {
      kernel.callBoxed(handle, c10::DispatchKeySet(c10::DispatchKey::Meta), stack);
    };
  }
}

}  // namespace

PredictionPointer predict(Operator& op, const Key& key, const Stack& stack, size_t begin) {
  {
    std::lock_guard<std::mutex> lock(op.mutex_);
    auto found = op.predictions_.find(key);
    if (found != op.predictions_.end()) return found->second;
  }
  std::shared_ptr<Prediction> made;
  if (op.meta) {
    made = std::make_shared<Prediction>(by_meta(op, stack, begin));
  } else {
    for (Fill fill : {Fill::kZeros, Fill::kFloatOnes, Fill::kOnes}) {
      try {
        made = std::make_shared<Prediction>(by_scratch(op, stack, begin, fill));
        break;
      } catch (const std::exception&) {
        // The next values, and in the end the real ones, tell whether it was the values or the arguments.
      }
    }
    if (!made) return nullptr;
  }
  set_cost(op, stack, begin, made.get());
  std::lock_guard<std::mutex> lock(op.mutex_);
  if (op.predictions_.size() >= kRemembered) op.predictions_.clear();
  op.predictions_[key] = made;
  return made;
}

void remember_meta_kernels() {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    auto handle = dispatcher.findSchema(name);
    bool has_one = handle && handle->hasKernelForDispatchKey(c10::DispatchKey::Meta);
    if (has_one && name.name.rfind("aten::", 0) == 0) remember(*handle);
  }
}

const MetaKernel* meta_kernel(const std::string& name) {
  auto found = meta_kernels().find(name);
  return found == meta_kernels().end() ? nullptr : &found->second;
}

}  // namespace operators
