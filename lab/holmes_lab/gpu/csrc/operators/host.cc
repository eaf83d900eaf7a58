// State of the threads that run CPU kernels: without autograd and modes, with the gradient mode of the caller
// (the CPU's LSTM takes another path if gradients are on), and with as many threads inside an operator as
// torch's main thread has.

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "operators.h"

namespace operators {

namespace {

std::atomic<int> threads_of_main{0};

void force_plain_dispatch() {
  c10::impl::LocalDispatchKeySet plain = c10::impl::tls_local_dispatch_key_set();
  plain.included_ = c10::DispatchKeySet(c10::DispatchKey::BackendSelect);
  plain.excluded_ = c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  c10::impl::_force_tls_local_dispatch_key_set(plain);
}

}  // namespace

int host_threads() {
  thread_local bool main = syscall(SYS_gettid) == getpid();
  if (main) threads_of_main.store(at::get_num_threads(), std::memory_order_relaxed);
  return threads_of_main.load(std::memory_order_relaxed);
}

void enter_worker(int threads, bool gradients) {
  thread_local int current = -1;
  c10::GradMode::set_enabled(gradients);
  if (current == threads) return;
  if (current == -1) force_plain_dispatch();
  if (threads > 0) at::set_num_threads(threads);
  current = threads;
}

HostKernels::HostKernels() : before_(c10::impl::tls_local_dispatch_key_set()) { force_plain_dispatch(); }

HostKernels::~HostKernels() { c10::impl::_force_tls_local_dispatch_key_set(before_); }

}  // namespace operators
