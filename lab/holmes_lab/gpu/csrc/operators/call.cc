// One call of an operator on emulated GPUs: on the host its outputs and a launch, on the worker thread its
// CPU kernel.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstring>

#include "emulated_gpu.h"
#include "own.h"

namespace operators {

namespace {

// Data of a call for the worker thread. All tensors in it are CPU tensors over memory that they do not own.
struct Launch {
  const Operator* op = nullptr;
  Stack stack;  // arguments; of op->out with the outputs behind them
  c10::SmallVector<at::Tensor, 4> outputs;
  PredictionPointer prediction;
  Seed seed;
  int threads = 0;
  bool gradients = false;
};

void check_looks(const at::Tensor& found, const Look& predicted) {
  TORCH_CHECK(found.scalar_type() == predicted.dtype && found.sizes() == predicted.sizes &&
                  found.strides() == predicted.strides,
              "an output has sizes ", found.sizes(), " and strides ", found.strides(), ", predicted were ",
              predicted.sizes, " and ", predicted.strides);
}

// After a kernel that wrote into the output itself.
void check_output(at::Tensor& output, const Look& predicted) {
  check_looks(output, predicted);
  if (output.is_conj() != predicted.conjugate) {
    output._set_conj(predicted.conjugate);
    output.conj_physical_();
  }
}

void fill_output(const at::Tensor& output, const at::Tensor& result, const Look& predicted) {
  TORCH_CHECK(result.defined() == predicted.defined, "an output is there or not, other than predicted");
  if (!result.defined()) return;
  check_looks(result, predicted);
  TORCH_CHECK(result.is_conj() == predicted.conjugate && result.is_neg() == predicted.negative,
              "an output is conjugated or negated, other than predicted");
  int64_t bytes = span_bytes(predicted);
  if (bytes) memcpy(output.data_ptr(), result.const_data_ptr(), bytes);
}

void run_kernel(Launch& launch) {
  const Operator& op = *launch.op;
  op.run(&launch.stack, launch.seed, /*into_outputs=*/op.out != nullptr);
  if (op.out) {
    for (size_t index = 0; index < launch.outputs.size(); ++index) {
      check_output(launch.outputs[index], launch.prediction->outputs[index]);
    }
    return;
  }
  size_t first = launch.stack.size() - op.returns.size(), next = 0;
  for (size_t index = 0; index < op.returns.size(); ++index) {
    if (op.returns[index] != kNew) continue;
    each_tensor(launch.stack[first + index], [&](const at::Tensor& result) {
      fill_output(launch.outputs[next], result, launch.prediction->outputs[next]);
      ++next;
    });
  }
}

void run_launch(void* argument) {
  Launch& launch = *static_cast<Launch*>(argument);
  enter_worker(launch.threads, launch.gradients);
  try {
    run_kernel(launch);
  } catch (const c10::Error& error) {
    egpuFail(egpuThisKernel(), error.what_without_backtrace());
  } catch (const std::exception& error) {
    egpuFail(egpuThisKernel(), error.what());
  }
}

void release_launch(void* argument) { delete static_cast<Launch*>(argument); }

// The values of a CPU tensor as they are now.
at::Tensor snapshot(const at::Tensor& tensor) {
  at::Tensor taken = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    taken.unsafeGetTensorImpl()->set_wrapped_number(true);
  return taken;
}

void resize_written(const Operator& op, const Prediction& prediction, const Stack& stack, size_t begin) {
  size_t place = 0;
  for (size_t index = 0; index < op.parameters.size(); ++index) {
    if (!op.parameters[index].written) continue;
    each_tensor(stack[begin + index], [&](const at::Tensor& tensor) {
      const c10::DimVector& sizes = prediction.resized[place++];
      if (tensor.sizes() != sizes) at::native::resize_output(tensor, sizes);
    });
  }
}

at::Tensor new_output(const Look& output, c10::Device device) {
  if (!output.defined) return at::Tensor();
  at::Tensor made(at::detail::empty_strided_cuda(output.sizes, output.strides, output.dtype, device));
  if (output.conjugate) made._set_conj(true);
  if (output.negative) made._set_neg(true);
  return made;
}

// Memory that a call reads and writes, for the search for missing waits. Tensors with holes are left out: the
// elements between may belong to another stream.
void describe_accesses(const Operator& op, const Stack& stack, size_t begin,
                       const std::vector<at::Tensor>& fresh) {
  c10::SmallVector<egpuAccess, 16> accesses;
  auto add = [&](const at::Tensor& tensor, bool writes) {
    if (tensor.defined() && tensor.is_cuda() && tensor.is_non_overlapping_and_dense())
      accesses.push_back({tensor.const_data_ptr(), tensor.nbytes(), writes});
  };
  for (bool writes : {false, true}) {
    for (size_t index = 0; index < op.parameters.size(); ++index) {
      if (op.parameters[index].written != writes) continue;
      each_tensor(stack[begin + index], [&](const at::Tensor& tensor) { add(tensor, writes); });
    }
  }
  for (const at::Tensor& tensor : fresh) add(tensor, true);
  egpuDescribeAccesses(accesses.data(), accesses.size());
}

}  // namespace

// The returns of a call, in place of its arguments.
void replace_by_returns(const Operator& op, Stack* stack, size_t begin, std::vector<at::Tensor> fresh,
                        const Prediction& prediction) {
  c10::SmallVector<c10::IValue, 4> results;
  size_t next = 0, place = 0, value = 0;
  for (int argument : op.returns) {
    if (argument != kNew) {
      results.push_back((*stack)[begin + argument]);
    } else if (int length = prediction.lengths[place++]; length == kOne) {
      results.emplace_back(std::move(fresh[next++]));
    } else if (length == kValue) {
      results.push_back(prediction.values[value++]);
    } else {
      c10::List<at::Tensor> list;
      for (int index = 0; index < length; ++index) list.push_back(std::move(fresh[next++]));
      results.emplace_back(std::move(list));
    }
  }
  stack->resize(begin);
  for (c10::IValue& result : results) stack->push_back(std::move(result));
}

void Operator::run(Stack* stack, const Seed& seed, bool into_outputs) const {
  const c10::DispatchKeySet cpu(host_key);
  if (generator >= 0) (*stack)[generator] = generator_of(seed);
  if (own) {
    set_seed_of_call(seed);
    own->kernel.callBoxed(handle, cpu, stack);
  } else {
    (into_outputs ? *out : handle).redispatchBoxed(cpu, stack);
  }
}

void Operator::call(Stack* stack) {
  const size_t begin = stack->size() - parameters.size();
  Key key;
  c10::Device device = describe(*this, *stack, &key);
  if (!device.is_cuda() || device.index() < 0) device = c10::Device(c10::kCUDA, c10::cuda::current_device());
  c10::cuda::CUDAGuard guard(device);
  PredictionPointer prediction = reads_values ? nullptr : predict(*this, key, *stack, begin);
  if (!prediction) return run_now(*this, stack, device);

  if (out_variant) resize_written(*this, *prediction, *stack, begin);
  auto launch = std::make_unique<Launch>();
  Aliases aliases;
  for (size_t index = begin; index < stack->size(); ++index) {
    launch->stack.push_back(with_tensors((*stack)[index], [&](const at::Tensor& tensor) {
      return tensor.defined() && tensor.is_cpu() ? snapshot(tensor) : aliases.of(tensor);
    }));
  }
  std::vector<at::Tensor> fresh;
  fresh.reserve(prediction->outputs.size());
  for (const Look& output : prediction->outputs) {
    fresh.push_back(new_output(output, device));
    if (!output.defined) {
      launch->outputs.emplace_back();
      continue;
    }
    launch->outputs.push_back(aliases.of_memory(fresh.back().mutable_data_ptr(), output));
    if (out) launch->stack.emplace_back(launch->outputs.back());
  }
  if (random) launch->seed = take_seed(generator >= 0 ? (*stack)[begin + generator] : c10::IValue(), device);
  launch->op = this;
  launch->prediction = prediction;
  launch->threads = host_threads();
  launch->gradients = c10::GradMode::is_enabled();
  if (egpuSearchesRaces()) describe_accesses(*this, *stack, begin, fresh);
  egpuKernel kernel{name.c_str(),      run_launch,        release_launch, launch.release(),
                    prediction->flops, prediction->bytes, /*sms=*/0};
  C10_CUDA_CHECK(egpuLaunch(c10::cuda::getCurrentCUDAStream(device.index()).stream(), &kernel));
  replace_by_returns(*this, stack, begin, std::move(fresh), *prediction);
}

}  // namespace operators
