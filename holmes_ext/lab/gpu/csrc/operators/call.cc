// One call of an operator on emulated GPUs: on the host its outputs and a launch, on the worker thread its CPU kernel.

#include <ATen/core/Tensor.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstring>

#include "emulated_gpu.h"
#include "operators.h"

namespace operators {

namespace {

thread_local Seed seed_of_thread;

// What the worker thread needs of a call. All tensors in it are CPU tensors over memory that they do not own.
struct Launch {
  const Operator* op = nullptr;
  Stack stack;                             // arguments; of op->out with the outputs behind them
  c10::SmallVector<at::Tensor, 4> outputs;
  PredictionPointer prediction;
  Seed seed;
  int threads = 0;
};


void fill_output(const at::Tensor& output, const at::Tensor& result, const Output& predicted) {
  TORCH_CHECK(result.defined() == predicted.defined, "an output is there or not, other than predicted");
  if (!result.defined()) return;
  Output found = look(result);
  TORCH_CHECK(found.dtype == predicted.dtype && found.sizes == predicted.sizes && found.strides == predicted.strides &&
                  found.conjugate == predicted.conjugate && found.negative == predicted.negative,
              "an output has sizes ", result.sizes(), " and strides ", result.strides(), ", predicted were ",
              predicted.sizes, " and ", predicted.strides);
  int64_t bytes = span_bytes(predicted);
  if (bytes) memcpy(output.data_ptr(), result.const_data_ptr(), bytes);
}

void run_kernel(Launch& launch) {
  const Operator& op = *launch.op;
  op.run(&launch.stack, launch.seed, /*into_outputs=*/op.out != nullptr);
  if (op.out) {
    size_t first = launch.stack.size() - launch.outputs.size();
    for (size_t index = 0; index < launch.outputs.size(); ++index) {
      TORCH_CHECK(launch.stack[first + index].toTensor().const_data_ptr() == launch.outputs[index].const_data_ptr(),
                  "the CPU's kernel moved an output");
    }
    return;
  }
  size_t first = launch.stack.size() - op.returns.size(), next = 0;
  for (size_t index = 0; index < op.returns.size(); ++index) {
    if (op.returns[index].argument >= 0) continue;
    each_tensor(launch.stack[first + index], [&](const at::Tensor& result) {
      fill_output(launch.outputs[next], result, launch.prediction->outputs[next]);
      ++next;
    });
  }
}

void run_launch(void* argument) {
  Launch& launch = *static_cast<Launch*>(argument);
  enter_worker(launch.threads);
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
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) taken.unsafeGetTensorImpl()->set_wrapped_number(true);
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

at::Tensor new_output(const Output& output, c10::Device device) {
  if (!output.defined) return at::Tensor();
  at::Tensor made(at::detail::empty_strided_cuda(output.sizes, output.strides, output.dtype, device));
  if (output.conjugate) made._set_conj(true);
  if (output.negative) made._set_neg(true);
  return made;
}

}  // namespace

const Seed& seed_of_call() { return seed_of_thread; }

void launch(const char* name, void (*run)(void*), void (*release)(void*), void* argument, double flops, double bytes,
            c10::Device device) {
  egpuKernel kernel{name, run, release, argument, flops, bytes, /*sms=*/0};
  C10_CUDA_CHECK(egpuLaunch(c10::cuda::getCurrentCUDAStream(device.index()).stream(), &kernel));
}

// The returns of a call, in place of its arguments.
void replace_by_returns(const Operator& op, Stack* stack, size_t begin, std::vector<at::Tensor> fresh,
                        const Prediction& prediction) {
  c10::SmallVector<c10::IValue, 4> results;
  size_t next = 0, place = 0, value = 0;
  for (const Return& one : op.returns) {
    if (one.argument >= 0) {
      results.push_back((*stack)[begin + one.argument]);
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
  const c10::DispatchKeySet cpu(c10::DispatchKey::CPU);
  if (generator >= 0) (*stack)[generator] = generator_of(seed);
  if (own) {
    seed_of_thread = seed;
    own->kernel.callBoxed(handle, cpu, stack);
  } else {
    (into_outputs ? *out : handle).redispatchBoxed(cpu, stack);
  }
}

void Operator::operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
  const size_t begin = stack->size() - parameters.size();
  Key key;
  c10::Device device = describe(*this, *stack, &key);
  if (!device.is_cuda()) device = c10::Device(c10::kCUDA, c10::cuda::current_device());
  if (device.index() < 0) device = c10::Device(c10::kCUDA, c10::cuda::current_device());
  c10::cuda::CUDAGuard guard(device);
  PredictionPointer prediction = reads_values ? nullptr : predict(*this, key, *stack, begin);
  if (!prediction) return run_now(*this, stack, device);

  if (out_variant) resize_written(*this, *prediction, *stack, begin);
  auto call = std::make_unique<Launch>();
  Aliases aliases;
  for (size_t index = begin; index < stack->size(); ++index) {
    call->stack.push_back(with_tensors((*stack)[index], [&](const at::Tensor& tensor) {
      return tensor.defined() && tensor.is_cpu() ? snapshot(tensor) : aliases.of(tensor);
    }));
  }
  std::vector<at::Tensor> fresh;
  fresh.reserve(prediction->outputs.size());
  for (const Output& output : prediction->outputs) {
    fresh.push_back(new_output(output, device));
    if (!output.defined) {
      call->outputs.emplace_back();
      continue;
    }
    call->outputs.push_back(aliases.of_memory(fresh.back().mutable_data_ptr(), output));
    if (out) call->stack.emplace_back(call->outputs.back());
  }
  if (random) call->seed = take_seed(generator >= 0 ? (*stack)[begin + generator] : c10::IValue(), device);
  call->op = this;
  call->prediction = prediction;
  call->threads = host_threads();
  launch(name.c_str(), run_launch, release_launch, call.release(), prediction->flops, prediction->bytes, device);
  replace_by_returns(*this, stack, begin, std::move(fresh), *prediction);
}

}  // namespace operators
