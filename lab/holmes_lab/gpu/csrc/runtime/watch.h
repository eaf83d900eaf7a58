#pragma once

namespace gpu {

// Starts the thread that shows the state of this process to the lab (watch.cc), if there is a lab.
void start_watch();

// Has the Python stacks of all threads written to rank<N>.stack, that of this thread as the current one.
void python_stacks();

}  // namespace gpu
