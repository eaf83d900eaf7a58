// Launches. Kernels that a host function stands for run; any other is an error that names it and torch's
// operator.

#include <string.h>
#include <time.h>

#include <unordered_map>

#include "api.h"
#include "emulated_gpu.h"
#include "text.h"

namespace gpu {

namespace {

struct HostKernel {
  std::string name;
  egpuHostFunction run;
};

std::mutex kernels_mutex;
// Address of a host stub -> the function that runs in its place; and the names of stubs that nvcc's code
// registers.
std::unordered_map<const void*, HostKernel>& host_kernels() {
  static auto* made = new std::unordered_map<const void*, HostKernel>;
  return *made;
}
std::unordered_map<const void*, const char*>& known_names() {
  static auto* made = new std::unordered_map<const void*, const char*>;
  return *made;
}

thread_local std::string launch_label;
thread_local std::vector<Access> next_accesses;

std::string name_of(const void* symbol) {
  std::lock_guard<std::mutex> lock(kernels_mutex);
  auto found = known_names().find(symbol);
  return found == known_names().end() ? text("at %p", symbol) : readable(found->second);
}

// torch.cuda._sleep: a kernel that counts clock cycles, here nanoseconds.
bool is_sleep(const std::string& name) { return name.find("spin_kernel(long)") != std::string::npos; }

cudaError_t launch_stub(const void* symbol, void** arguments, cudaStream_t stream) {
  std::string name = name_of(symbol);
  if (is_sleep(name)) {
    long nanoseconds = *static_cast<long*>(arguments[0]);
    auto work = std::make_shared<Work>();
    work->name = "sleep";
    work->run = [=] {
      timespec span{nanoseconds / 1000000000, nanoseconds % 1000000000};
      nanosleep(&span, nullptr);
    };
    return launch(stream, std::move(work));
  }
  std::string of = operator_of_thread();
  return refuse(cudaErrorInvalidDeviceFunction,
                "kernel " + name + (of.empty() ? "" : " of " + of) + " is not emulated");
}

}  // namespace

cudaError_t launch(cudaStream_t handle, WorkPointer work, Ticket* ticket) {
  static const bool blocking = [] {
    const char* value = getenv("CUDA_LAUNCH_BLOCKING");
    return value && atoi(value) != 0;
  }();
  StreamPointer stream = stream_of(handle);
  work->label = launch_label;
  bool is_kernel = work->kind == Kind::kKernel;
  if (is_kernel) work->accesses.swap(next_accesses);
  Ticket mine = Scheduler::instance().submit(stream, std::move(work));
  if (ticket) *ticket = mine;
  if (blocking && is_kernel) Scheduler::instance().wait("a launch (CUDA_LAUNCH_BLOCKING=1)", {mine});
  return result(cudaSuccess);
}

}  // namespace gpu

using gpu::result;

extern "C" {

cudaError_t egpuLaunch(cudaStream_t stream, const egpuKernel* kernel) {
  auto work = std::make_shared<gpu::Work>();
  work->name = kernel->name;
  work->flops = kernel->flops;
  work->bytes = kernel->bytes;
  work->sms = kernel->sms;
  auto run = kernel->run;
  std::shared_ptr<void> argument(kernel->argument, kernel->release);
  work->run = [run, argument] { run(argument.get()); };
  return gpu::launch(stream, std::move(work));
}

void egpuRegisterKernel(const void* symbol, const char* name, egpuHostFunction run) {
  std::lock_guard<std::mutex> lock(gpu::kernels_mutex);
  gpu::host_kernels()[symbol] = {name, run};
}

void egpuDescribeLaunch(const char* json_members) { gpu::launch_label = json_members; }

int egpuSearchesRaces(void) { return gpu::Scheduler::instance().searches_races(); }

void egpuDescribeAccesses(const egpuAccess* accesses, size_t count) {
  gpu::next_accesses.clear();
  for (size_t index = 0; index < count; ++index)
    gpu::next_accesses.push_back({accesses[index].begin, accesses[index].size, accesses[index].writes != 0});
}

// A launch with a parameter buffer. NCCL launches in this way; cuda.cc's cuLaunchKernelEx ends here.
// started: an event that is over once the kernel has started, or nullptr.
cudaError_t egpuLaunchBuffer(const void* symbol, const void* buffer, size_t size, int blocks,
                             cudaStream_t stream, cudaEvent_t started) {
  gpu::HostKernel kernel;
  {
    std::lock_guard<std::mutex> lock(gpu::kernels_mutex);
    auto found = gpu::host_kernels().find(symbol);
    if (found != gpu::host_kernels().end()) kernel = found->second;
  }
  if (!kernel.run)
    return gpu::refuse(cudaErrorInvalidDeviceFunction, "kernel " + gpu::name_of(symbol) + " is not emulated");
  auto arguments = std::make_shared<std::vector<char>>(size);
  memcpy(arguments->data(), buffer, size);
  auto work = std::make_shared<gpu::Work>();
  work->name = kernel.name;
  work->sms = blocks;
  work->run = [kernel, arguments, blocks] { kernel.run(arguments->data(), blocks); };
  gpu::Ticket ticket;
  cudaError_t error = gpu::launch(stream, std::move(work), &ticket);
  if (started) {
    ticket.begun = true;
    started->record = std::make_shared<gpu::Record>(gpu::Record{ticket, gpu::now()});
  }
  return error;
}

cudaError_t cudaLaunchKernel(const void* symbol, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return gpu::launch_stub(symbol, arguments, stream);
}

// nvcc 13 calls this function, with the result of __cudaGetKernel.
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t,
                               cudaStream_t stream) {
  return gpu::launch_stub(kernel, arguments, stream);
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* symbol) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(symbol));
  return cudaSuccess;
}

cudaError_t cudaLaunchCooperativeKernel(const void* symbol, dim3, dim3, void** arguments, size_t,
                                        cudaStream_t stream) {
  return gpu::launch_stub(symbol, arguments, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* symbol, void** arguments) {
  return gpu::launch_stub(symbol, arguments, config->stream);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  auto work = std::make_shared<gpu::Work>();
  work->kind = gpu::Kind::kHostFunction;
  work->name = "host function";
  work->run = [=] { function(data); };
  return gpu::launch(stream, std::move(work));
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned) {
  auto work = std::make_shared<gpu::Work>();
  work->kind = gpu::Kind::kHostFunction;
  work->name = "stream callback";
  work->run = [=] { callback(stream, cudaSuccess, data); };
  return gpu::launch(stream, std::move(work));
}

cudaError_t cudaGetFuncBySymbol(cudaFunction_t* function, const void* symbol) {
  *function = static_cast<cudaFunction_t>(const_cast<void*>(symbol));
  return result(cudaSuccess);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 64;
  attributes->ptxVersion = attributes->binaryVersion = 80;
  attributes->maxDynamicSharedSizeBytes = 163 << 10;
  return result(cudaSuccess);
}

cudaError_t cudaFuncSetAttribute(const void*, enum cudaFuncAttribute, int) { return result(cudaSuccess); }

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int block_size, size_t) {
  *blocks = 2048 / (block_size > 0 ? block_size : 1);
  return result(cudaSuccess);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* symbol,
                                                                   int block_size, size_t shared, unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, symbol, block_size, shared);
}

// Called by nvcc's code when a library is loaded: kernels are stored by name.
void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}

void __cudaRegisterFunction(void**, const char* symbol, char*, const char* name, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {
  std::lock_guard<std::mutex> lock(gpu::kernels_mutex);
  gpu::known_names()[symbol] = name;
}

// The <<<grid, block, shared, stream>>> of a launch, for the stub that nvcc wrote.
static thread_local std::vector<cudaLaunchConfig_t> configurations;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configurations.push_back({grid, block, shared, stream, nullptr, 0});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const cudaLaunchConfig_t& top = configurations.back();
  *grid = top.gridDim;
  *block = top.blockDim;
  *shared = top.dynamicSmemBytes;
  *static_cast<cudaStream_t*>(stream) = top.stream;
  configurations.pop_back();
  return cudaSuccess;
}
}
