// Random numbers. The CUDA generator counts: an operator takes its seed and offset and moves the offset on,
// as CUDA's operators do, so that get_rng_state, set_rng_state, fork_rng and recomputation hold. The numbers
// are those of a CPU generator whose state is made from both; they are not Philox's.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>

#include "own.h"

namespace operators {

namespace {

constexpr uint64_t kStep = 4;  // offset that one operator takes; offsets are multiples of 4

uint64_t mixed(uint64_t* state) {  // splitmix64 (Steele, Lea, Flood 2014)
  uint64_t word = *state += 0x9e3779b97f4a7c15ull;
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9ull;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebull;
  return word ^ (word >> 31);
}

thread_local Seed seed_of_thread;

}  // namespace

const Seed& seed_of_call() { return seed_of_thread; }
void set_seed_of_call(const Seed& seed) { seed_of_thread = seed; }

Seed take_seed(const c10::IValue& generator, c10::Device device) {
  at::Generator used = generator.isGenerator() ? generator.toGenerator() : at::Generator();
  if (!used.defined()) used = at::cuda::detail::getDefaultCUDAGenerator(device.index());
  TORCH_CHECK(used.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
              used.device().type(), "'");
  std::lock_guard<std::mutex> lock(used.mutex());
  Seed seed{used.current_seed(), used.get_offset()};
  used.set_offset(seed.offset + kStep);
  return seed;
}

at::Generator generator_of(const Seed& seed) {
  uint64_t state = seed.seed;
  state = mixed(&state) + seed.offset;
  at::mt19937_data_pod words = at::mt19937(seed.seed).data();
  for (size_t index = 0; index < words.state_.size(); ++index)
    words.state_[index] = static_cast<uint32_t>(mixed(&state));
  at::mt19937 engine;
  engine.set_data(words);
  at::Generator made = at::detail::createCPUGenerator(seed.seed);
  at::check_generator<at::CPUGeneratorImpl>(made)->set_engine(engine);
  return made;
}

namespace {

std::tuple<at::Tensor, at::Tensor> dropped(const at::Tensor& input, double p,
                                           const at::Generator& generator) {
  double kept = 1 - p;
  at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(kept, generator);
  return {input.mul(mask).mul_(kept == 0 ? 0. : 1. / kept), mask};
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                  std::optional<bool> train) {
  if (train.has_value() && !*train)
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  return dropped(input, p, generator_of(seed_of_call()));
}

// p: here the share that is kept.
std::tuple<at::Tensor, at::Tensor> fused_dropout(const at::Tensor& input, double p,
                                                 std::optional<at::Generator>) {
  auto [output, mask] = dropped(input, 1 - p, generator_of(seed_of_call()));
  return {output, mask.to(at::kByte)};
}

at::Tensor masked_scale(const at::Tensor& self, const at::Tensor& mask, double scale) {
  return self.mul(mask).mul_(scale);
}

}  // namespace

OwnKernels random_kernels() {
  return {{"native_dropout", host_kernel(native_dropout), /*random=*/true},
          {"_fused_dropout", host_kernel(fused_dropout), /*random=*/true},
          {"_masked_scale", host_kernel(masked_scale)}};
}

}  // namespace operators
