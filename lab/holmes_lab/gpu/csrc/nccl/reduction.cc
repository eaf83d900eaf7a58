#include "reduction.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_fp8.h"

namespace device_side {

namespace {

// Small floating-point types compute in float, all others in themselves.
template <typename T>
struct Wide {
  using type = T;
};
template <>
struct Wide<half> {
  using type = float;
};
template <>
struct Wide<__nv_bfloat16> {
  using type = float;
};
template <>
struct Wide<__nv_fp8_e4m3> {
  using type = float;
};
template <>
struct Wide<__nv_fp8_e5m2> {
  using type = float;
};
template <typename T>
typename Wide<T>::type wide(T value) {
  return static_cast<typename Wide<T>::type>(value);
}

template <typename T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename T>
T smaller_or_larger(T a, T b, uint64_t argument) {
  if constexpr (std::is_integral_v<T>) {  // NCCL flips bits so that one unsigned comparison serves min, max
                                          // and signs
    using U = std::make_unsigned_t<T>;
    U mask = static_cast<U>(argument), x = static_cast<U>(a) ^ mask, y = static_cast<U>(b) ^ mask;
    return static_cast<T>(std::min(x, y) ^ mask);
  } else {
    bool is_min = (argument & 1) == 0;
    if (!(wide(a) == wide(a))) return a;  // NaN stays
    if (!(wide(b) == wide(b))) return b;
    return (wide(a) < wide(b)) == is_min ? a : b;
  }
}

template <typename T>
void combine_as(const Reduction& how, T* into, const T* other, size_t count) {
  switch (how.op) {
    case Op::kProd:
      for (size_t i = 0; i < count; ++i) into[i] = static_cast<T>(wide(into[i]) * wide(other[i]));
      return;
    case Op::kMinMax:
      for (size_t i = 0; i < count; ++i) into[i] = smaller_or_larger(into[i], other[i], how.argument);
      return;
    default:
      for (size_t i = 0; i < count; ++i) into[i] = static_cast<T>(wide(into[i]) + wide(other[i]));
  }
}

template <typename T>
void multiply(uint64_t factor, T* data, size_t count) {
  const T by = from_bits<T>(factor);
  for (size_t i = 0; i < count; ++i) data[i] = static_cast<T>(wide(data[i]) * wide(by));
}

template <typename T>
void divide(uint64_t argument, T* data, size_t count) {
  if constexpr (std::is_integral_v<T>) {
    uint64_t divisor = argument >> 1;
    for (size_t i = 0; i < count; ++i) {
      if (argument & 1) {
        using S = std::make_signed_t<T>;
        data[i] = static_cast<T>(static_cast<S>(static_cast<S>(data[i]) / static_cast<int64_t>(divisor)));
      } else {
        data[i] = static_cast<T>(data[i] / divisor);
      }
    }
  }
}

// Calls function(T*) for the type.
template <typename Function>
void with_type(Type type, void* data, Function function) {
  switch (type) {
    case Type::kI8:
    case Type::kU8:
      return function(static_cast<uint8_t*>(data));
    case Type::kI32:
    case Type::kU32:
      return function(static_cast<uint32_t*>(data));
    case Type::kI64:
    case Type::kU64:
      return function(static_cast<uint64_t*>(data));
    case Type::kF16:
      return function(static_cast<half*>(data));
    case Type::kF32:
      return function(static_cast<float*>(data));
    case Type::kF64:
      return function(static_cast<double*>(data));
    case Type::kBF16:
      return function(static_cast<__nv_bfloat16*>(data));
    case Type::kF8E4M3:
      return function(static_cast<__nv_fp8_e4m3*>(data));
    case Type::kF8E5M2:
      return function(static_cast<__nv_fp8_e5m2*>(data));
  }
}

}  // namespace

size_t Reduction::size() const {
  switch (type) {
    case Type::kI8:
    case Type::kU8:
    case Type::kF8E4M3:
    case Type::kF8E5M2:
      return 1;
    case Type::kF16:
    case Type::kBF16:
      return 2;
    case Type::kI32:
    case Type::kU32:
    case Type::kF32:
      return 4;
    default:
      return 8;
  }
}

void Reduction::combine(void* into, const void* other, size_t count) const {
  with_type(type, into, [&](auto* data) {
    combine_as(*this, data, static_cast<decltype(data)>(const_cast<void*>(other)), count);
  });
}

void Reduction::before(void* data, size_t count) const {
  if (has_before()) with_type(type, data, [&](auto* values) { multiply(argument, values, count); });
}

void Reduction::after(void* data, size_t count) const {
  if (has_after()) with_type(type, data, [&](auto* values) { divide(argument, values, count); });
}

}  // namespace device_side
