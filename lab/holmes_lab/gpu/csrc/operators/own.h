// Operators by hand.
#pragma once

#include <map>

#include "operators.h"

namespace operators {

// Function that runs in place of a CPU kernel, on CPU tensors.
struct OwnKernel {
  std::string name;  // without aten::
  c10::KernelFunction kernel;
  bool random = false;  // takes seed_of_call()
};
using OwnKernels = std::vector<OwnKernel>;
const Seed& seed_of_call();  // random.cc: of the own kernel that runs on this thread
void set_seed_of_call(const Seed& seed);

template <class Function>
c10::KernelFunction host_kernel(Function* function) {
  return c10::KernelFunction::makeFromUnboxedRuntimeFunction(function);
}

OwnKernels attention_kernels();
OwnKernels packed_attention_kernels();
OwnKernels normalization_kernels();
OwnKernels recurrent_kernels();
OwnKernels matrix_kernels();
OwnKernels random_kernels();
OwnKernels cudnn_kernels();

// Operators that do something else on the host thread, too: by name without aten::.
using MakeOperator = std::unique_ptr<Operator> (*)(const c10::OperatorHandle&);
using HostParts = std::map<std::string, MakeOperator>;
template <class Kind>
std::unique_ptr<Operator> make(const c10::OperatorHandle& handle) {
  return std::make_unique<Kind>(handle);
}

HostParts copy_parts();
HostParts recurrent_parts();
HostParts cudnn_parts();

// Operators of other keys than CUDA.
struct OfKey {
  c10::DispatchKey key;
  std::string name;
  std::unique_ptr<Operator> kernel;
};
std::vector<OfKey> sparse_operators();
std::vector<OfKey> nested_operators();
std::vector<OfKey> recurrent_operators();

}  // namespace operators
