// Device memory: for each emulated GPU a file in memory (memfd), mapped once. cudaMalloc returns pieces of
// it.
//
//     base                                                                  base + HOLMES_GPU_MEMORY_MB
//     | piece | free |   piece   |              free (never touched: no memory)              |
//
// Another process maps the file for cudaIpcOpenMemHandle.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

namespace gpu {

class DeviceMemory {
 public:
  explicit DeviceMemory(int device);
  void* allocate(size_t size);  // nullptr: not enough
  bool free(void* address);     // false: not the beginning of a piece
  bool holds(const void* address) const;
  size_t offset(const void* address) const { return static_cast<const char*>(address) - base_; }
  size_t total() const { return total_; }
  size_t used();
  bool piece_of(const void* address, size_t* begin, size_t* size);
  int file() const { return file_; }

 private:
  char* base_ = nullptr;
  size_t total_ = 0, used_ = 0;
  int file_ = -1;
  std::mutex mutex_;
  std::map<size_t, size_t> free_, pieces_;  // offset -> size
};

DeviceMemory& memory_of(int device);

}  // namespace gpu
