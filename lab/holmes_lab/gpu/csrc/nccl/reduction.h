// The arithmetic of NCCL's reductions on the host, element by element, each result rounded to the data's
// type.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace device_side {

enum class Op { kNone, kSum, kProd, kMinMax, kPreMulSum, kSumPostDiv };
enum class Type { kI8, kU8, kI32, kU32, kI64, kU64, kF16, kF32, kF64, kBF16, kF8E4M3, kF8E5M2 };

// argument: the number that NCCL's host code encodes for the operation (hostToDevRedOp in enqueue.cc): the
// factor of kPreMulSum in the data's type, 2 x the divisor (+ 1 if signed) of kSumPostDiv, for kMinMax a mask
// (integers) or whether it is max.
struct Reduction {
  Op op = Op::kNone;
  Type type = Type::kU8;
  uint64_t argument = 0;
  size_t size() const;                                              // of an element, bytes
  void combine(void* into, const void* other, size_t count) const;  // into = into (op) other
  void before(void* data, size_t count) const;                      // to this rank's own input
  void after(void* data, size_t count) const;                       // to the final result
  bool has_before() const { return op == Op::kPreMulSum; }
  bool has_after() const { return op == Op::kSumPostDiv; }
};

}  // namespace device_side
