// torch's operators on emulated GPUs: each aten operator of the CUDA key runs its CPU kernel, on the stream.
//
//     host thread                                          the stream's worker thread
//     -----------                                          --------------------------
//     dispatcher, CUDA key
//       call.cc       Operator::operator()
//       metadata.cc     what the arguments look like (a key)
//       prediction.cc   what the outputs look like: by the operator's Meta kernel, or by one run of its CPU kernel
//                       on scratch memory; kept by key
//                       outputs from torch's caching allocator
//       alias.cc        CPU tensors over the same memory
//                       egpuLaunch ------------------------>  call.cc  run_launch: the CPU kernel on these tensors
//     goes on                                                 an exception becomes the device's error
//
// What is launched owns no device memory: the allocator reuses it as on a GPU. Operators whose result the host must
// know (values.cc: item, nonzero, unique ...) wait for their stream, as CUDA's do, and run on the host thread.
//
//     register.cc   walks the dispatcher: which operator gets which kernel
//     random.cc     seed and offset of the CUDA generator -> a CPU generator
//     cost.cc       FLOPs and bytes of a call, for the emulated clock
//     copy.cc, attention.cc, ...   kernels by hand
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace operators {

using torch::jit::Stack;

// A call's arguments as numbers: all that decides what its outputs look like.
using Key = c10::SmallVector<int64_t, 64>;
struct KeyHash {
  size_t operator()(const Key& key) const;
};

struct Parameter {
  bool scalar = false;      // Scalar or list of it: outputs depend on its type, not on its value
  bool written = false;     // Tensor(a!)
  bool generator = false;
  bool device = false;
};

constexpr int kOne = -1, kValue = -2;  // a return that is one tensor; that is a number

struct Return {
  int argument = -1;  // it is this argument; -1: a new tensor, list of tensors, or value
  bool list = false;
};

// What one new tensor looks like.
struct Output {
  bool defined = false;
  c10::ScalarType dtype = c10::ScalarType::Float;
  c10::DimVector sizes, strides;
  bool conjugate = false, negative = false;
};

// What a call with some key does.
struct Prediction {
  std::vector<Output> outputs;           // all new tensors, lists flattened
  std::vector<int> lengths;              // for each new return: of its list; kOne or kValue
  std::vector<c10::IValue> values;       // of returns that are no tensors
  std::vector<c10::DimVector> resized;   // out= variants: the sizes of what is written
  double flops = 0, bytes = 0;
};
using PredictionPointer = std::shared_ptr<const Prediction>;

// Of random numbers: what a call took from the CUDA generator.
struct Seed {
  uint64_t seed = 0, offset = 0;
};

struct OwnKernel;

// The kernel on the CUDA key of one operator.
class Operator : public c10::OperatorKernel {
 public:
  explicit Operator(const c10::OperatorHandle& handle);
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack);
  // The CPU kernel on a stack of CPU tensors; into_outputs: that of `out`.
  void run(Stack* stack, const Seed& seed, bool into_outputs) const;

  const c10::OperatorHandle handle;
  const std::string name;                 // aten::add.Tensor
  std::vector<Parameter> parameters;
  std::vector<Return> returns;
  int generator = -1;                     // which parameter it is
  bool random = false;                    // takes a seed
  bool out_variant = false;               // written arguments may be resized
  bool reads_values = false;              // the host must know the result
  bool scalar_values_count = false;       // outputs depend on the values of scalars and floats (arange)
  bool host_tensors = false;              // takes CPU tensors besides CUDA tensors (indices)
  std::unique_ptr<c10::OperatorHandle> out;     // writes into given tensors what `handle` returns
  const OwnKernel* own = nullptr;
  const c10::SafeKernelFunction* meta = nullptr;  // torch's C++ Meta kernel

 private:
  friend PredictionPointer predict(Operator&, const Key&, const Stack&, size_t);
  std::mutex mutex_;
  std::unordered_map<Key, PredictionPointer, KeyHash> predictions_;
};

// Operators with a kernel of their own: what runs in place of a CPU kernel, on CPU tensors.
struct OwnKernel {
  std::string name;  // without aten::
  c10::KernelFunction kernel;
  bool random = false;  // takes seed_of_call()
};
using OwnKernels = std::vector<OwnKernel>;
template <class Function>
c10::KernelFunction host_kernel(Function* function) {
  return c10::KernelFunction::makeFromUnboxedRuntimeFunction(function);
}
OwnKernels attention_kernels();
OwnKernels normalization_kernels();
OwnKernels recurrent_kernels();
OwnKernels matrix_kernels();
OwnKernels random_kernels();

// Operators that need more than the general kernel on the host thread.
using MakeKernel = torch::CppFunction (*)(const c10::OperatorHandle&);
using HostParts = std::vector<std::pair<std::string, MakeKernel>>;
template <class Kernel>
MakeKernel host_part() {
  return [](const c10::OperatorHandle& handle) {
    return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(handle));
  };
}
HostParts copy_parts();
HostParts recurrent_parts();

// metadata.cc. Describes the last parameters.size() values of a stack, and finds their device. Raises torch's error
// where tensors are on several devices.
c10::Device describe(const Operator& op, const Stack& stack, Key* key);

// prediction.cc. nullptr: only a run on the real values can tell.
PredictionPointer predict(Operator& op, const Key& key, const Stack& stack, size_t begin);
// Remembers the C++ Meta kernels; to be called before Python registers its own (while torch is being imported).
void remember_meta_kernels();
const c10::SafeKernelFunction* meta_kernel(const std::string& name);

// alias.cc. CPU tensors over the memory of CUDA tensors; the same tensor or storage gives the same alias or storage.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& tensor);
  at::Tensor of_memory(void* data, const Output& output);

 private:
  c10::SmallVector<std::pair<const c10::TensorImpl*, at::Tensor>, 8> tensors_;
  c10::SmallVector<std::pair<const c10::StorageImpl*, c10::Storage>, 8> storages_;
};
// The value with each tensor in it replaced by change(tensor).
c10::IValue with_tensors(const c10::IValue& value, c10::function_ref<at::Tensor(const at::Tensor&)> change);
// Calls visit for each tensor in the value, defined or not.
void each_tensor(const c10::IValue& value, c10::function_ref<void(const at::Tensor&)> visit);
int64_t span_bytes(const Output& output);  // from its first to its last element
Output look(const at::Tensor& tensor);

// values.cc. Waits for the stream, runs on the host, puts the results into the stack.
void run_now(const Operator& op, Stack* stack, c10::Device device);

// random.cc
Seed take_seed(const c10::IValue& generator, c10::Device device);
at::Generator generator_of(const Seed& seed);
const Seed& seed_of_call();  // of the own kernel that runs on this thread

// cost.cc
void set_cost(const Operator& op, const Stack& stack, size_t begin, Prediction* prediction);

// host.cc. While it lives this thread runs CPU kernels as torch's main thread would: no gradients, no modes, as many
// threads.
class HostKernels {
 public:
  HostKernels();
  ~HostKernels();

 private:
  c10::impl::LocalDispatchKeySet before_;
  bool gradients_;
};
int host_threads();            // of the main thread; its own value where called on it
void enter_worker(int threads);  // once, and whenever the number changes

// Launches run(argument) on the current stream of the device.
void launch(const char* name, void (*run)(void*), void (*release)(void*), void* argument, double flops, double bytes,
            c10::Device device);

}  // namespace operators
