// FLOPs and bytes of a call, for the emulated clock: of matrix products and fused attention 2 for each multiply
// and add, as torch/utils/flop_counter.py counts them; of everything the bytes of its inputs and outputs.

#include <ATen/core/Tensor.h>

#include "operators.h"

namespace operators {

namespace {

double matrix_flops(const std::string& name, const Stack& stack, size_t begin) {
  auto tensor = [&](int index) { return stack[begin + index].toTensor(); };
  auto product = [](const at::Tensor& left, const at::Tensor& right) {
    return 2.0 * static_cast<double>(left.numel()) * static_cast<double>(right.size(-1));
  };
  if (name == "mm" || name == "bmm" || name == "_scaled_mm" || name == "_int_mm" || name == "_grouped_mm") {
    return tensor(1).dim() < 1 ? 0 : product(tensor(0), tensor(1));
  }
  if (name == "addmm" || name == "baddbmm" || name == "addbmm" || name == "_addmm_activation") {
    return product(tensor(1), tensor(2));
  }
  if (name == "addmv") return 2.0 * static_cast<double>(tensor(1).numel());
  if (name == "dot" || name == "vdot") return 2.0 * static_cast<double>(tensor(0).numel());
  return 0;
}

// query [batch, heads, queries, width] (scaled_dot_product), [batch, queries, heads, width], or packed sequences
// (packed_attention.cc), which count as if all were equally long. A causal mask saves nothing.
double attention_flops(const c10::FunctionSchema& schema, const Stack& stack, size_t begin) {
  auto tensor = [&](const char* name) {
    auto index = schema.argumentIndexWithName(name);
    const c10::IValue value = index ? stack[begin + *index] : c10::IValue();
    return value.isTensor() ? value.toTensor() : at::Tensor();
  };
  at::Tensor query = tensor("query"), key = tensor("key"), value = tensor("value");
  if (schema.name().find("_attention") == std::string::npos || !query.defined() || !key.defined() ||
      !value.defined() || query.dim() < 3 || query.numel() == 0)
    return 0;
  bool heads_first = schema.name().find("scaled_dot_product") != std::string::npos;
  double keys = static_cast<double>(key.size(heads_first ? -2 : -3));
  for (const char* name : {"cum_seq_q", "cu_seqlens_q"}) {
    at::Tensor bounds = heads_first ? at::Tensor() : tensor(name);
    if (bounds.defined() && bounds.numel() > 1) keys /= static_cast<double>(bounds.numel() - 1);
  }
  bool backward = tensor("out").defined();  // computes the scores again, and four gradients
  double width = static_cast<double>(query.size(-1)), value_width = static_cast<double>(value.size(-1));
  double products = backward ? 3 * width + 2 * value_width : width + value_width;
  return 2.0 * static_cast<double>(query.numel()) / width * keys * products;
}

}  // namespace

void set_cost(const Operator& op, const Stack& stack, size_t begin, Prediction* prediction) {
  double bytes = 0;
  for (size_t index = begin; index < stack.size(); ++index) {
    each_tensor(stack[index], [&](const at::Tensor& tensor) {
      if (tensor.defined()) bytes += static_cast<double>(tensor.numel() * tensor.element_size());
    });
  }
  for (const Look& output : prediction->outputs)
    bytes += static_cast<double>(output.defined ? span_bytes(output) : 0);
  prediction->bytes = bytes;
  const c10::FunctionSchema& schema = op.handle.schema();
  prediction->flops =
      matrix_flops(schema.name().substr(6), stack, begin) + attention_flops(schema, stack, begin);
}

}  // namespace operators
