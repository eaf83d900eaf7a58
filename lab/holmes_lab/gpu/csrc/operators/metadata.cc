// Description of a call's arguments, as a key: sizes, strides and types of tensors, and all other values
// except scalars that only enter the arithmetic.

#include <ATen/core/Tensor.h>

#include <cstring>

#include "operators.h"

namespace operators {

namespace {

enum Tag : int64_t {
  kNone,
  kUndefined,
  kTensor,
  kInt,
  kDouble,
  kBool,
  kComplex,
  kText,
  kList,
  kDevice,
  kGenerator
};

struct Description {
  const Operator& op;
  Key& key;
  c10::Device device{c10::kCPU};  // of the CUDA tensors
  bool device_known = false, host_tensor = false;

  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return key.push_back(kUndefined);
    const c10::TensorImpl* inside = tensor.unsafeGetTensorImpl();
    bool cuda = inside->device_type() == c10::kCUDA;
    if (cuda) {
      see(inside->device());
    } else if (inside->dim() > 0 && !op.host_tensors) {
      host_tensor = true;
    }
    key.push_back(kTensor | static_cast<int64_t>(c10::typeMetaToScalarType(inside->dtype())) << 8 |
                  inside->dim() << 16 | static_cast<int64_t>(cuda) << 32 |
                  static_cast<int64_t>(inside->is_wrapped_number()) << 33 |
                  static_cast<int64_t>(tensor.is_conj()) << 34 | static_cast<int64_t>(tensor.is_neg()) << 35);
    key.append(inside->sizes().begin(), inside->sizes().end());
    key.append(inside->strides().begin(), inside->strides().end());
  }

  void see(c10::Device found) {
    if (!device_known) {
      device = found;
      device_known = true;
    } else {
      TORCH_CHECK(device == found,
                  "Expected all tensors to be on the same device, but found at least two devices, ", device,
                  " and ", found, "! (", op.name, ")");
    }
  }

  void add(const c10::IValue& value, bool type_only) {
    if (value.isTensor()) {
      add(value.toTensor());
    } else if (value.isNone()) {
      key.push_back(kNone);
    } else if (value.isInt()) {
      key.push_back(kInt);
      if (!type_only) key.push_back(value.toInt());
    } else if (value.isDouble()) {
      key.push_back(kDouble);
      if (op.scalar_values_count) add_bits(value.toDouble());
    } else if (value.isBool()) {
      key.push_back(kBool + (value.toBool() ? 256 : 0));
    } else if (value.isList()) {
      const auto& all = value.toListRef();
      key.push_back(kList + 256 * static_cast<int64_t>(all.size()));
      for (const c10::IValue& one : all) add(one, type_only);
    } else if (value.isComplexDouble()) {
      key.push_back(kComplex);
    } else if (value.isString()) {
      key.push_back(kText + 256 * static_cast<int64_t>(std::hash<std::string>()(value.toStringRef()) >> 8));
    } else if (value.isGenerator()) {
      key.push_back(kGenerator);
    } else if (value.isDevice()) {
      key.push_back(kDevice);
      if (value.toDevice().is_cuda()) see(value.toDevice());
    } else {
      TORCH_CHECK_NOT_IMPLEMENTED(false, "emulated GPU: ", op.name, " with an argument of type ",
                                  value.tagKind(), " is not emulated");
    }
  }

  void add_bits(double number) {
    int64_t bits;
    memcpy(&bits, &number, sizeof bits);
    key.push_back(bits);
  }
};

}  // namespace

size_t KeyHash::operator()(const Key& key) const {
  uint64_t hash = key.size();
  for (int64_t word : key) {
    hash = (hash ^ static_cast<uint64_t>(word)) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 29;
  }
  return hash;
}

c10::Device describe(const Operator& op, const Stack& stack, Key* key) {
  Description description{op, *key};
  size_t begin = stack.size() - op.parameters.size();
  for (size_t index = 0; index < op.parameters.size(); ++index) {
    const Parameter& parameter = op.parameters[index];
    description.add(stack[begin + index], parameter.scalar && !op.scalar_values_count);
  }
  TORCH_CHECK(!description.host_tensor || !description.device_known,
              "Expected all tensors to be on the same device, but found at least two devices, ",
              description.device, " and cpu! (", op.name, ")");
  return description.device;
}

}  // namespace operators
