// NCCL allocates more host memory for a communicator than it uses, such as 64 MB for the operations of its proxy
// thread, and fills all of it with zeros. A GPU server has that memory. A machine that emulates several servers
// may not, so here a page takes memory only once something else than these zeros is written to it.
//
// Linked by --wrap around the C functions that NCCL calls.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

constexpr size_t kLarge = 1 << 20;  // bytes: smaller blocks are left alone

// The last large block that this thread has got from malloc. NCCL fills a block with zeros right afterwards
// (ncclCalloc in src/include/alloc.h).
thread_local char* block_begin = nullptr;
thread_local size_t block_size = 0;

}  // namespace

extern "C" {

void* __real_malloc(size_t size);
void* __wrap_malloc(size_t size) {
  void* block = __real_malloc(size);
  if (size >= kLarge) {
    block_begin = static_cast<char*>(block);
    block_size = size;
  }
  return block;
}

void __real_free(void* block);
void __wrap_free(void* block) {
  if (block == block_begin) block_begin = nullptr;
  __real_free(block);
}

void* __real_memset(void* begin, int value, size_t size);
void* __wrap_memset(void* begin, int value, size_t size) {
  bool is_new_block = size >= kLarge && begin == block_begin && size <= block_size;
  if (value != 0 || !is_new_block) return __real_memset(begin, value, size);
  block_begin = nullptr;
  // Whole pages of private memory read as zeros after MADV_DONTNEED. The rest is written.
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  char* end = static_cast<char*>(begin) + size;
  char* first_page = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(begin) + page - 1) & ~(page - 1));
  char* after_pages = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(end) & ~(page - 1));
  if (madvise(first_page, static_cast<size_t>(after_pages - first_page), MADV_DONTNEED) != 0)
    return __real_memset(begin, value, size);
  __real_memset(begin, 0, static_cast<size_t>(first_page - static_cast<char*>(begin)));
  __real_memset(after_pages, 0, static_cast<size_t>(end - after_pages));
  return begin;
}
}
