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

// query [batch, heads, queries, width] (scaled_dot_product), [batch, queries, heads, width], or packed
// sequences (packed_attention.cc). These count as if all were equally long. A causal mask saves nothing.
double attention_flops(const c10::FunctionSchema& schema, const Stack& stack, size_t begin) {
  auto tensor = [&](const char* name) {
    auto index = schema.argumentIndexWithName(name);
    const c10::IValue value = index ? stack[begin + *index] : c10::IValue();
    return value.isTensor() ? value.toTensor() : at::Tensor();
  };
  auto is = [&](const char* kind) { return schema.name().rfind(kind, 0) == 0; };
  bool heads_first = is("aten::_scaled_dot_product_");
  if (!heads_first && !is("aten::_flash_attention_") && !is("aten::_efficient_attention_")) return 0;
  at::Tensor query = tensor("query"), key = tensor("key"), value = tensor("value");
  if (!query.defined() || !key.defined() || !value.defined() || query.numel() == 0) return 0;
  double keys = static_cast<double>(key.size(heads_first ? -2 : -3));
  for (const char* name : {"cum_seq_q", "cu_seqlens_q"}) {
    at::Tensor bounds = heads_first ? at::Tensor() : tensor(name);
    if (bounds.defined() && bounds.numel() > 1) keys /= static_cast<double>(bounds.numel() - 1);
  }
  bool backward = tensor("out").defined();  // the scores again; gradients of weights, query, key, value
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
