// Nested tensors of the strided layout: the CPU's kernels compose them from operators of their parts. On
// parts in device memory, these are the CUDA operators. (Jagged nested tensors are implemented in Python, and
// need nothing here.)

#include "own.h"

namespace operators {

namespace {

class FromParts : public Operator {
 public:
  FromParts(const c10::OperatorHandle& handle, c10::DispatchKey key) : Operator(handle) { host_key = key; }
  void call(Stack* stack) override { handle.redispatchBoxed(c10::DispatchKeySet(host_key), stack); }
};

void add_for(c10::DispatchKey key, c10::DispatchKey host_key, std::initializer_list<const char*> names,
             std::vector<OfKey>* all) {
  for (const std::string name : names) {
    auto handle = c10::Dispatcher::singleton().findSchema({"aten::" + name, ""});
    if (!handle || !handle->hasComputedKernelForDispatchKey(host_key)) continue;
    all->push_back({key, name, std::make_unique<FromParts>(*handle, host_key)});
  }
}

}  // namespace

std::vector<OfKey> nested_operators() {
  std::vector<OfKey> all;
  add_for(c10::DispatchKey::NestedTensorCUDA, c10::DispatchKey::NestedTensorCPU, {"to_padded_tensor", "bmm"},
          &all);
  add_for(c10::DispatchKey::CUDA, c10::DispatchKey::CPU,
          {"_nested_from_padded", "_nested_tensor_from_mask", "_nested_tensor_from_mask_left_aligned",
           "_nested_compute_contiguous_strides_offsets"},
          &all);
  return all;
}

}  // namespace operators
