#include <stdlib.h>

#include <string>

#include "emulated_gpu.h"

extern "C" long egpuSetting(const char* name, long otherwise) {
  const char* value = getenv((std::string("HOLMES_GPU_") + name).c_str());
  return value && *value ? atol(value) : otherwise;
}
