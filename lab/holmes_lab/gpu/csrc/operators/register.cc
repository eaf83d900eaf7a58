// Registration of a kernel on the CUDA key for each operator.

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <map>
#include <set>

#include "own.h"

namespace operators {

namespace {

// They only make or change a tensor's metadata, or work through CUDA's runtime alone: torch's own stay.
const std::set<std::string> kTorchsOwn = {
    "empty.memory_format",
    "empty_strided",
    "_efficientzerotensor",
    "resize_",
    "set_",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
    "is_set_to",
    "record_stream",
    "_local_scalar_dense",
    "_fused_sdp_choice",
    // nested.cc
    "_nested_from_padded",
    "_nested_tensor_from_mask",
    "_nested_tensor_from_mask_left_aligned",
    "_nested_compute_contiguous_strides_offsets",
};

// They have no kernel on the CUDA key, but the functions that they call have one, or a table by device.
const std::set<std::string> kBesides = {"convolution", "convolution_backward", "copy_"};

// They read values on a GPU too, though no tag says so.
const std::set<std::string> kReadValues = {
    "_unique",        "nonzero_static", "_to_sparse",     "_to_sparse.sparse_dim",
    "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc"};

const std::set<std::string> kScalarValuesCount = {"arange.start_out", "range.out", "linspace.out",
                                                  "logspace.out"};

// Structured, but their out= variants make the output large before it becomes the result.
const std::set<std::string> kOutputForMore = {"mse_loss", "smooth_l1_loss"};

const std::set<std::string> kHostTensors = {"index.Tensor", "index.Tensor_out", "_index_put_impl_",
                                            "index_put_", "_ctc_loss.Tensor"};

class Refused : public c10::OperatorKernel {
 public:
  explicit Refused(std::string name) : name_(std::move(name)) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack*) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "emulated GPU: ", name_, " is not emulated");
  }

 private:
  const std::string name_;
};

bool view(const c10::FunctionSchema& schema) {
  for (const c10::Argument& one : schema.returns()) {
    if (one.alias_info() && !one.alias_info()->isWrite()) return true;
  }
  return false;
}

// The overload that writes the results of `handle` into given tensors, if the CPU has a separate kernel for
// it.
std::unique_ptr<c10::OperatorHandle> out_overload(const c10::OperatorHandle& handle) {
  const c10::FunctionSchema& schema = handle.schema();
  for (const c10::Argument& argument : schema.arguments()) {
    if (argument.alias_info()) return nullptr;
  }
  for (const c10::Argument& one : schema.returns()) {
    if (one.type()->kind() != c10::TypeKind::TensorType) return nullptr;
  }
  auto& dispatcher = c10::Dispatcher::singleton();
  static const auto* overloads = [] {
    auto* all = new std::multimap<std::string, c10::OperatorName>;
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames())
      all->emplace(name.name, name);
    return all;
  }();
  auto [first, last] = overloads->equal_range(schema.name());
  for (; first != last; ++first) {
    auto other = dispatcher.findSchema(first->second);
    if (!other || !other->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    const auto& arguments = other->schema().arguments();
    size_t count = schema.arguments().size();
    bool same = arguments.size() == count + schema.returns().size();
    for (size_t index = 0; same && index < arguments.size(); ++index) {
      same = index < count ? !arguments[index].alias_info() &&
                                 arguments[index].name() == schema.arguments()[index].name() &&
                                 *arguments[index].type() == *schema.arguments()[index].type()
                           : arguments[index].is_out();
    }
    if (same) return std::make_unique<c10::OperatorHandle>(*other);
  }
  return nullptr;
}

const OwnKernel* own_kernel(const std::string& name) {
  static const auto* kernels = [] {
    auto* all = new std::map<std::string, OwnKernel>;
    for (const OwnKernels& some :
         {attention_kernels(), packed_attention_kernels(), normalization_kernels(), recurrent_kernels(),
          matrix_kernels(), random_kernels(), cudnn_kernels()}) {
      for (const OwnKernel& kernel : some) all->emplace(kernel.name, kernel);
    }
    return all;
  }();
  auto found = kernels->find(name);
  return found == kernels->end() ? nullptr : &found->second;
}

bool has_tag(const c10::OperatorHandle& handle, at::Tag tag) {
  auto tags = handle.getTags();
  return std::find(tags.begin(), tags.end(), tag) != tags.end();
}

torch::Library& library_of(c10::DispatchKey key) {
  static auto* libraries = new std::map<c10::DispatchKey, torch::Library>;
  return libraries->try_emplace(key, torch::Library::IMPL, "aten", key, __FILE__, __LINE__).first->second;
}

template <class Kernel>
void add(torch::Library& library, const std::string& name, std::unique_ptr<Kernel> kernel) {
  library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
}

struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

Operator::Operator(const c10::OperatorHandle& handle)
    : handle(handle), name(c10::toString(handle.operator_name())) {
  const c10::FunctionSchema& schema = handle.schema();
  const std::string own = name.substr(name.find("::") + 2);
  for (const c10::Argument& argument : schema.arguments()) {
    Parameter parameter;
    const std::string type = argument.real_type()->str();
    parameter.scalar = type == "Scalar" || type == "Scalar?" || type == "Scalar[]";
    parameter.written = argument.alias_info() && argument.alias_info()->isWrite();
    if (argument.type()->str().find("Generator") != std::string::npos)
      generator = static_cast<int>(parameters.size());
    if (parameter.written && argument.is_out()) out_variant = true;
    parameters.push_back(parameter);
  }
  for (const c10::Argument& one : schema.returns()) {
    int argument = kNew;
    for (size_t index = 0; one.alias_info() && index < schema.arguments().size(); ++index) {
      const c10::AliasInfo* other = schema.arguments()[index].alias_info();
      if (other && other->beforeSets() == one.alias_info()->beforeSets()) argument = static_cast<int>(index);
    }
    returns.push_back(argument);
    const c10::TypeKind kind = one.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) reads_values = !own_kernel(own);
  }
  reads_values = reads_values || has_tag(handle, at::Tag::data_dependent_output) ||
                 has_tag(handle, at::Tag::dynamic_output_shape) || kReadValues.count(own);
  scalar_values_count = generator >= 0 || kScalarValuesCount.count(own);
  host_tensors = kHostTensors.count(own) != 0;
  this->own = own_kernel(own);
  random = generator >= 0 || (this->own && this->own->random);
  meta = meta_kernel(name);
  if (meta && !this->own && !kOutputForMore.count(own))
    out = out_overload(handle);  // others use `out` for intermediate values
}

void install() {
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard no_warning(&silent);  // that a kernel is registered over another
  auto& dispatcher = c10::Dispatcher::singleton();
  HostParts host_parts;
  for (const HostParts& parts : {copy_parts(), recurrent_parts(), cudnn_parts()})
    host_parts.insert(parts.begin(), parts.end());
  for (const c10::OperatorName& full : dispatcher.getAllOpNames()) {
    const std::string name = c10::toString(full);
    if (name.rfind("aten::", 0) != 0) continue;
    auto handle = dispatcher.findSchema(full);
    const std::string own = name.substr(6);
    if (!handle || kTorchsOwn.count(own) || view(handle->schema())) continue;
    if (!handle->hasKernelForDispatchKey(c10::DispatchKey::CUDA) && !kBesides.count(own)) continue;
    auto part = host_parts.find(own);
    if (part != host_parts.end()) {
      add(library_of(c10::DispatchKey::CUDA), own, part->second(*handle));
    } else if (own_kernel(own) || handle->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {
      add(library_of(c10::DispatchKey::CUDA), own, std::make_unique<Operator>(*handle));
    } else {
      add(library_of(c10::DispatchKey::CUDA), own, std::make_unique<Refused>(name));
    }
  }
  for (std::vector<OfKey>& all : std::array{sparse_operators(), nested_operators(), recurrent_operators()}) {
    for (OfKey& one : all) add(library_of(one.key), one.name, std::move(one.kernel));
  }
}

}  // namespace operators

extern "C" {

// While torch is being imported: before its Python part replaces Meta kernels.
void egpuOperatorsPrepare() { operators::remember_meta_kernels(); }

// Called when torch is imported. Returns "" or an error message.
const char* egpuOperatorsInstall() {
  static std::string problem;
  try {
    operators::install();
  } catch (const std::exception& error) {
    problem = error.what();
  }
  return problem.c_str();
}
}
