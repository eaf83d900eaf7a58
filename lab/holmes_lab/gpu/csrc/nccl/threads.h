// Threads for the blocks of NCCL's kernels, and how they wait.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "emulated_gpu.h"

namespace device_side {

// Runs all at the same time, the last one on this thread; returns when all are done.
void run_together(std::vector<std::function<void()>> tasks);

// Waits for a value that another process or thread writes: at first awake, then in naps
// (runtime/patience.cc). After a while it records the target of the wait, for the report of a job that hangs.
class Waiting {
 public:
  // abort: NCCL's flag of the communicator; describe: JSON members.
  Waiting(egpuRunning kernel, volatile uint32_t* abort, std::function<std::string()> describe);
  ~Waiting();
  bool goes_on();  // pauses; false when the communicator is aborted

 private:
  egpuRunning kernel_;
  volatile uint32_t* abort_;
  std::function<std::string()> describe_;
  int turns_ = 0;
  bool told_ = false;
};

}  // namespace device_side
