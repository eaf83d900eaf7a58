#pragma once

namespace device_side {

// Runs a kernel of NCCL's collectives and of send and receive. arguments: ncclDevKernelArgs and the data
// after it.
void run_kernel(const void* arguments, int blocks);

}  // namespace device_side
