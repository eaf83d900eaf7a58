// Collective, reduction, type, algorithm and protocol of each function of NCCL's device code, by its number:
// a table that generate.py makes from NCCL's table.
#pragma once

#include "device.h"

#include "reduction.h"

namespace device_side {

struct Function {
  ncclFunc_t collective;
  Op op;
  Type type;
  int algorithm, protocol;  // NCCL_ALGO_*, NCCL_PROTO_*
};

extern const Function kFunctions[];

}  // namespace device_side
