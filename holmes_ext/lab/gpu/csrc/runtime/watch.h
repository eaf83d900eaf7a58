#pragma once

namespace gpu {

// Starts the thread that shows the lab what this process does (watch.cc), where there is a lab.
void start_watch();

}  // namespace gpu
