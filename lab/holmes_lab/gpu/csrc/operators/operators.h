// torch's operators on emulated GPUs: each aten operator of the CUDA key runs its CPU kernel, on the stream.
//
//     host thread                                          the stream's worker thread
//     -----------                                          --------------------------
//     dispatcher, CUDA key
//       call.cc       Operator::call
//       metadata.cc     description of the arguments (a key)
//       prediction.cc   description of the outputs: by the operator's Meta kernel, or by one run of its
//                       CPU kernel on scratch memory; kept by key
//                       outputs from torch's caching allocator
//       tensors.cc      CPU tensors over the same memory
//                       egpuLaunch ------------------------>  call.cc  run_launch: the CPU kernel on these
//     goes on                                                 an exception becomes the device's error
//
// Launched work owns no device memory: the allocator reuses that memory as on a GPU. Operators whose result
// the host must know (values.cc: nonzero, unique, equal ...) wait for their stream, as CUDA's do, and run on
// the host thread.
//
//     register.cc   registers the kernels of all operators with torch's dispatcher
//     host.cc       state of the threads that run CPU kernels
//     random.cc     seed and offset of the CUDA generator -> a CPU generator
//     cost.cc       FLOPs and bytes of a call, for the emulated clock
//     own.h         operators by hand: copy, attention, recurrent, normalization, matrix, cudnn ...
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "tensors.h"

namespace operators {

using torch::jit::Stack;

// A call's arguments as numbers: all values that the description of its outputs depends on.
using Key = c10::SmallVector<int64_t, 64>;
struct KeyHash {
  size_t operator()(const Key& key) const;
};

struct Parameter {
  bool scalar = false;   // Scalar or a list of it: outputs depend on its type, not on its value
  bool written = false;  // Tensor(a!)
};

constexpr int kNew = -1;               // a return that is no argument
constexpr int kOne = -1, kValue = -2;  // a new return that is one tensor; that is a number

// Outputs of the calls with some key.
struct Prediction {
  std::vector<Look> outputs;            // all new tensors, lists flattened
  std::vector<int> lengths;             // for each new return: of its list; kOne or kValue
  std::vector<c10::IValue> values;      // of returns that are no tensors
  std::vector<c10::DimVector> resized;  // out= variants: the sizes of the written tensors
  double flops = 0, bytes = 0;
};
using PredictionPointer = std::shared_ptr<const Prediction>;

// Seed and offset that a call took from the CUDA generator, for its random numbers.
struct Seed {
  uint64_t seed = 0, offset = 0;
};

struct OwnKernel;
using MetaKernel = std::function<void(Stack*)>;

// The kernel on the CUDA key of one operator.
class Operator : public c10::OperatorKernel {
 public:
  explicit Operator(const c10::OperatorHandle& handle);
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) { call(stack); }
  virtual void call(Stack* stack);
  // The CPU kernel on a stack of CPU tensors; into_outputs: that of `out`.
  void run(Stack* stack, const Seed& seed, bool into_outputs) const;

  const c10::OperatorHandle handle;
  const std::string name;  // aten::add.Tensor
  std::vector<Parameter> parameters;
  std::vector<int> returns;                  // for each: the index of the argument that is returned, or kNew
  int generator = -1;                        // index of the parameter with the generator
  bool random = false;                       // takes a seed
  bool out_variant = false;                  // written arguments may be resized
  bool reads_values = false;                 // the host must know the result
  bool scalar_values_count = false;          // outputs depend on the values of scalars and floats (arange)
  bool host_tensors = false;                 // takes CPU tensors besides CUDA tensors (indices)
  std::unique_ptr<c10::OperatorHandle> out;  // writes the results of `handle` into given tensors
  const OwnKernel* own = nullptr;            // runs in place of the CPU kernel
  const MetaKernel* meta = nullptr;          // torch's, in C++
  c10::DispatchKey host_key = c10::DispatchKey::CPU;

 private:
  friend PredictionPointer predict(Operator&, const Key&, const Stack&, size_t);
  std::mutex mutex_;
  std::unordered_map<Key, PredictionPointer, KeyHash> predictions_;
};

// metadata.cc. Describes the last parameters.size() values of a stack, and finds their device. Raises torch's
// error where tensors are on several devices.
c10::Device describe(const Operator& op, const Stack& stack, Key* key);

// prediction.cc. nullptr: only a run on the real values can tell.
PredictionPointer predict(Operator& op, const Key& key, const Stack& stack, size_t begin);
// Remembers the C++ Meta kernels; to be called before Python registers its own (while torch is being
// imported).
void remember_meta_kernels();
const MetaKernel* meta_kernel(const std::string& name);

// values.cc. Waits for the stream, runs on the host, puts the results into the stack.
void run_now(const Operator& op, Stack* stack, c10::Device device);

// random.cc
Seed take_seed(const c10::IValue& generator, c10::Device device);
at::Generator generator_of(const Seed& seed);

// cost.cc
void set_cost(const Operator& op, const Stack& stack, size_t begin, Prediction* prediction);

// host.cc. While it lives this thread runs CPU kernels below autograd, without modes.
class HostKernels {
 public:
  HostKernels();
  ~HostKernels();

 private:
  c10::impl::LocalDispatchKeySet before_;
};
int host_threads();                              // inside an operator: those of torch's main thread
void enter_worker(int threads, bool gradients);  // makes a worker thread like the caller's

}  // namespace operators
