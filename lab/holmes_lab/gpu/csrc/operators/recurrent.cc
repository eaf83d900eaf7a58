// Recurrent networks. torch.lstm, gru and rnn take cuDNN's operator here whatever torch.backends.cudnn says,
// and the CPU's own lstm, gru or rnn runs in it, so the numbers are the CPU's. Its backward runs the network
// again, with gradients. The operators for one cell (LSTMCell, GRUCell) are written out.
//
//     lstm.input ... (NetworkCall)  ->  _cudnn_rnn (cudnn_rnn)  ->  the CPU's lstm (run_layers)
//     reserve   passed from forward to backward: the generator's seed and offset (dropout)

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>

#include "own.h"

namespace operators {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

enum Mode : int64_t { kRelu = 0, kTanh = 1, kLstm = 2, kGru = 3 };  // cuDNN's numbers

// While an object of this class exists, operators on this thread record the data for gradients.
class WithGradients {
 public:
  WithGradients() : before_(c10::impl::tls_local_dispatch_key_set()), enabled_(c10::GradMode::is_enabled()) {
    c10::impl::LocalDispatchKeySet usual = before_;
    usual.included_ = c10::default_included_set;
    usual.excluded_ = c10::default_excluded_set;
    c10::impl::_force_tls_local_dispatch_key_set(usual);
    c10::GradMode::set_enabled(true);
  }
  ~WithGradients() {
    c10::GradMode::set_enabled(enabled_);
    c10::impl::_force_tls_local_dispatch_key_set(before_);
  }

 private:
  c10::impl::LocalDispatchKeySet before_;
  bool enabled_;
};

struct Network {
  int64_t mode, layers, weights_of_cell;
  bool batch_first, train, bidirectional;
  double dropout;
  std::vector<int64_t> batch_sizes;  // of a packed sequence
  Seed seed;
};

struct State {
  Tensor output, h, c;
};

State run_layers(const Network& net, const Tensor& input, const std::vector<Tensor>& weights, const Tensor& h,
                 const Tensor& c, int64_t layers) {
  bool biases = net.weights_of_cell >= 4;
  State state;
  if (!net.batch_sizes.empty()) {
    Tensor sizes = at::tensor(net.batch_sizes, at::TensorOptions().dtype(at::kLong));
    if (net.mode == kLstm) {
      std::tie(state.output, state.h, state.c) =
          at::lstm(input, sizes, {h, c}, weights, biases, layers, 0.0, net.train, net.bidirectional);
    } else {
      auto run = net.mode == kGru
                     ? static_cast<decltype(&at::_ops::gru_data::call)>(&at::_ops::gru_data::call)
                 : net.mode == kTanh ? &at::_ops::rnn_tanh_data::call
                                     : &at::_ops::rnn_relu_data::call;
      std::tie(state.output, state.h) =
          run(input, sizes, h, weights, biases, layers, 0.0, net.train, net.bidirectional);
    }
    return state;
  }
  if (net.mode == kLstm) {
    std::tie(state.output, state.h, state.c) =
        at::lstm(input, {h, c}, weights, biases, layers, 0.0, net.train, net.bidirectional, net.batch_first);
    return state;
  }
  auto run = net.mode == kGru ? static_cast<decltype(&at::_ops::gru_input::call)>(&at::_ops::gru_input::call)
             : net.mode == kTanh ? &at::_ops::rnn_tanh_input::call
                                 : &at::_ops::rnn_relu_input::call;
  std::tie(state.output, state.h) =
      run(input, h, weights, biases, layers, 0.0, net.train, net.bidirectional, net.batch_first);
  return state;
}

// Layer by layer where there is dropout between them: the CPU's own would take the program's generator.
State run_network(const Network& net, const Tensor& input, const std::vector<Tensor>& weights,
                  const Tensor& h, const Tensor& c) {
  if (!(net.train && net.dropout > 0)) return run_layers(net, input, weights, h, c, net.layers);
  const int64_t directions = net.bidirectional ? 2 : 1, count = net.weights_of_cell * directions;
  at::Generator generator = generator_of(net.seed);
  std::vector<Tensor> all_h, all_c;
  State state{input, {}, {}};
  for (int64_t layer = 0; layer < net.layers; ++layer) {
    std::vector<Tensor> own(weights.begin() + layer * count, weights.begin() + (layer + 1) * count);
    auto part = [&](const Tensor& tensor) {
      return tensor.defined() ? tensor.narrow(0, layer * directions, directions) : tensor;
    };
    state = run_layers(net, state.output, own, part(h), part(c), 1);
    all_h.push_back(state.h);
    if (state.c.defined()) all_c.push_back(state.c);
    if (layer + 1 < net.layers) {
      Tensor factors =
          at::empty_like(state.output).bernoulli_(1 - net.dropout, generator).div_(1 - net.dropout);
      state.output = state.output * factors;
    }
  }
  return {state.output, at::cat(all_h), all_c.empty() ? Tensor() : at::cat(all_c)};
}

Network network(int64_t mode, int64_t layers, int64_t stride, bool batch_first, double dropout, bool train,
                bool bidirectional, c10::SymIntArrayRef batch_sizes, Seed seed) {
  std::vector<int64_t> sizes;
  for (const c10::SymInt& size : batch_sizes) sizes.push_back(size.expect_int());
  return {mode, layers, stride, batch_first, train, bidirectional, dropout, sizes, seed};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> cudnn_rnn(
    const Tensor& input, at::TensorList weight, int64_t stride, const OptionalTensor&, const Tensor& hx,
    const OptionalTensor& cx, int64_t mode, int64_t, int64_t, int64_t layers, bool batch_first,
    double dropout, bool train, bool bidirectional, c10::SymIntArrayRef batch_sizes, const OptionalTensor&) {
  Network net =
      network(mode, layers, stride, batch_first, dropout, train, bidirectional, batch_sizes, seed_of_call());
  State state = run_network(net, input, weight.vec(), hx, cx.value_or(Tensor()));
  Tensor reserve = at::empty({2}, at::kLong);
  reserve[0] = static_cast<int64_t>(net.seed.seed);
  reserve[1] = static_cast<int64_t>(net.seed.offset);
  if (!state.c.defined()) state.c = at::empty({0}, input.options());
  return {state.output, state.h, state.c, reserve, at::empty({0}, input.options())};
}

Tensor leaf(const Tensor& tensor) { return tensor.defined() ? tensor.detach().requires_grad_() : tensor; }

std::tuple<Tensor, Tensor, Tensor, std::vector<Tensor>> cudnn_rnn_backward(
    const Tensor& input, at::TensorList weight, int64_t stride, const Tensor&, const Tensor& hx,
    const OptionalTensor& cx, const Tensor&, const OptionalTensor& grad_output, const OptionalTensor& grad_hy,
    const OptionalTensor& grad_cy, int64_t mode, int64_t, int64_t, int64_t layers, bool batch_first,
    double dropout, bool train, bool bidirectional, c10::SymIntArrayRef batch_sizes, const OptionalTensor&,
    const Tensor& reserve, std::array<bool, 4> wanted) {
  Seed seed{static_cast<uint64_t>(reserve[0].item<int64_t>()),
            static_cast<uint64_t>(reserve[1].item<int64_t>())};
  Network net = network(mode, layers, stride, batch_first, dropout, train, bidirectional, batch_sizes, seed);
  WithGradients guard;
  std::vector<Tensor> leaves = {leaf(input), leaf(hx)};
  if (mode == kLstm) leaves.push_back(leaf(*cx));
  const size_t first = leaves.size();
  for (const Tensor& one : weight) leaves.push_back(leaf(one));
  State state = run_network(net, leaves[0], {leaves.begin() + static_cast<long>(first), leaves.end()},
                            leaves[1], mode == kLstm ? leaves[2] : Tensor());
  std::vector<Tensor> outputs, grads;
  auto add = [&](const Tensor& output, const OptionalTensor& grad) {
    if (!output.defined() || !grad || !grad->defined()) return;
    outputs.push_back(output);
    grads.push_back(*grad);
  };
  add(state.output, grad_output);
  add(state.h, grad_hy);
  add(state.c, grad_cy);
  std::vector<Tensor> found =
      torch::autograd::grad(outputs, leaves, grads, /*retain_graph=*/false, /*create_graph=*/false,
                            /*allow_unused=*/true);
  for (size_t index = 0; index < found.size(); ++index) {
    if (!found[index].defined()) found[index] = at::zeros_like(leaves[index]);
    found[index] = found[index].detach();
  }
  return {wanted[0] ? found[0] : Tensor(), wanted[1] ? found[1] : Tensor(),
          wanted[2] && mode == kLstm ? found[2] : Tensor(),
          wanted[3] ? std::vector<Tensor>(found.begin() + static_cast<long>(first), found.end())
                    : std::vector<Tensor>()};
}

Tensor with_bias(const Tensor& gates, const OptionalTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

// workspace: the four gates after their functions, [batch, 4 x hidden].
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                             const Tensor& cx, const OptionalTensor& input_bias,
                                             const OptionalTensor& hidden_bias) {
  Tensor gates = with_bias(hidden_gates, hidden_bias) + with_bias(input_gates, input_bias);
  auto cut = gates.chunk(4, 1);
  Tensor in = cut[0].sigmoid(), forget = cut[1].sigmoid(), cell = cut[2].tanh(), out = cut[3].sigmoid();
  Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const OptionalTensor& grad_hy,
                                                      const OptionalTensor& grad_cy, const Tensor& cx,
                                                      const Tensor& cy, const Tensor& workspace,
                                                      bool has_bias) {
  auto cut = workspace.chunk(4, 1);
  const Tensor &in = cut[0], &forget = cut[1], &cell = cut[2], &out = cut[3];
  Tensor grad_h = grad_hy && grad_hy->defined() ? *grad_hy : at::zeros_like(cy);
  Tensor grad_c = grad_cy && grad_cy->defined() ? *grad_cy : at::zeros_like(cy), bent = cy.tanh();
  Tensor grad_out = grad_h * bent * out * (1 - out);
  grad_c = grad_c + grad_h * out * (1 - bent * bent);
  Tensor gates = at::cat({grad_c * cell * in * (1 - in), grad_c * cx * forget * (1 - forget),
                          grad_c * in * (1 - cell * cell), grad_out},
                         1);
  return {gates, grad_c * forget, has_bias ? gates.sum(0) : Tensor()};
}

// workspace: reset, update and new gate, the old state, and the values that the reset gate multiplies,
// [batch, 5 x hidden].
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
                                    const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  auto in = with_bias(input_gates, input_bias).chunk(3, 1),
       hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  Tensor reset = (hidden[0] + in[0]).sigmoid(), update = (hidden[1] + in[1]).sigmoid();
  Tensor fresh = (in[2] + hidden[2] * reset).tanh();
  return {(hx - fresh) * update + fresh, at::cat({reset, update, fresh, hx, hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy,
                                                                     const Tensor& workspace, bool has_bias) {
  auto cut = workspace.chunk(5, 1);
  const Tensor &reset = cut[0], &update = cut[1], &fresh = cut[2], &hx = cut[3], &hidden = cut[4];
  Tensor grad_update = grad_hy * (hx - fresh) * update * (1 - update);
  Tensor grad_fresh = grad_hy * (1 - update) * (1 - fresh * fresh);
  Tensor grad_reset = grad_fresh * hidden * reset * (1 - reset);
  Tensor grad_in = at::cat({grad_reset, grad_update, grad_fresh}, 1);
  Tensor grad_hidden = at::cat({grad_reset, grad_update, grad_fresh * reset}, 1);
  return {grad_in, grad_hidden, grad_hy * update, has_bias ? grad_in.sum(0) : Tensor(),
          has_bias ? grad_hidden.sum(0) : Tensor()};
}

// torch.lstm(input, [h, c], weights, biases, layers, dropout, train, bidirectional, batch_first), or with
// batch_sizes of a packed sequence behind `input` and no batch_first; others have h in place of the list.
class NetworkCall : public Operator {
 public:
  NetworkCall(const c10::OperatorHandle& handle, Mode mode, bool packed)
      : Operator(handle), mode_(mode), packed_(packed) {}

  void call(Stack* stack) override {
    const size_t begin = stack->size() - parameters.size();
    auto argument = [&](size_t index) { return (*stack)[begin + index]; };
    const size_t first = packed_ ? 2 : 1;
    Tensor input = argument(0).toTensor(), h, c;
    if (mode_ == kLstm) {
      std::vector<Tensor> states = argument(first).toTensorVector();
      h = states.at(0);
      c = states.at(1);
    } else {
      h = argument(first).toTensor();
    }
    std::vector<Tensor> weights = argument(first + 1).toTensorVector();
    const bool biases = argument(first + 2).toBool();
    std::vector<int64_t> batch_sizes;
    if (packed_) {
      Tensor sizes = argument(1).toTensor();
      batch_sizes.assign(sizes.data_ptr<int64_t>(), sizes.data_ptr<int64_t>() + sizes.numel());
    }
    const bool autocast = at::autocast::is_autocast_enabled(c10::kCUDA);
    c10::impl::ExcludeDispatchKeyGuard no_autocast(
        autocast ? c10::DispatchKeySet(c10::DispatchKey::AutocastCUDA) : c10::DispatchKeySet());
    if (autocast) {
      for (Tensor* one : {&input, &h, &c}) *one = lower(*one);
      for (Tensor& one : weights) one = lower(one);
    }
    const int64_t hidden = mode_ == kLstm ? c.size(-1) : h.size(-1);
    const int64_t projected = h.size(-1) == hidden ? 0 : h.size(-1);
    const int64_t stride = 2 + (biases ? 2 : 0) + (projected ? 1 : 0);
    auto [output, h_out, c_out, reserve, buffer] =
        at::_cudnn_rnn(input, weights, stride, {}, h, c.defined() ? OptionalTensor(c) : std::nullopt, mode_,
                       hidden, projected, argument(first + 3).toInt(),
                       packed_ ? false : argument(first + 7).toBool(), argument(first + 4).toDouble(),
                       argument(first + 5).toBool(), argument(first + 6).toBool(), batch_sizes, {});
    stack->resize(begin);
    stack->emplace_back(std::move(output));
    stack->emplace_back(std::move(h_out));
    if (mode_ == kLstm) stack->emplace_back(std::move(c_out));
  }

 private:
  static Tensor lower(const Tensor& tensor) {
    return tensor.defined()
               ? at::autocast::cached_cast(at::autocast::get_autocast_dtype(c10::kCUDA), tensor, c10::kCUDA)
               : tensor;
  }

  const Mode mode_;
  const bool packed_;
};

// One buffer for all weights, as cuDNN requires: the caller's weights become views of it.
class FlattenWeights : public Operator {
 public:
  using Operator::Operator;
  void call(Stack* stack) override {
    const size_t begin = stack->size() - parameters.size();
    std::vector<Tensor> weights = (*stack)[begin].toTensorVector();
    int64_t total = 0;
    for (const Tensor& one : weights) total += one.numel();
    Tensor buffer = at::empty({total}, weights.at(0).options());
    int64_t offset = 0;
    for (Tensor& one : weights) {
      Tensor place = buffer.narrow(0, offset, one.numel()).view(one.sizes());
      place.copy_(one);
      one.set_(place);
      offset += place.numel();
    }
    stack->resize(begin);
    stack->emplace_back(std::move(buffer));
  }
};

}  // namespace

OwnKernels recurrent_kernels() {
  return {{"_cudnn_rnn", host_kernel(cudnn_rnn), /*random=*/true},
          {"_cudnn_rnn_backward", host_kernel(cudnn_rnn_backward)},
          {"_thnn_fused_lstm_cell", host_kernel(lstm_cell)},
          {"_thnn_fused_lstm_cell_backward_impl", host_kernel(lstm_cell_backward)},
          {"_thnn_fused_gru_cell", host_kernel(gru_cell)},
          {"_thnn_fused_gru_cell_backward", host_kernel(gru_cell_backward)}};
}

std::vector<OfKey> recurrent_operators() {
  const std::pair<const char*, Mode> networks[] = {
      {"lstm", kLstm}, {"gru", kGru}, {"rnn_tanh", kTanh}, {"rnn_relu", kRelu}};
  std::vector<OfKey> all;
  for (c10::DispatchKey key : {c10::DispatchKey::CUDA, c10::DispatchKey::AutogradCUDA}) {
    for (const auto& [name, mode] : networks) {
      for (const std::string overload : {"input", "data"}) {
        auto handle = c10::Dispatcher::singleton().findSchemaOrThrow((std::string("aten::") + name).c_str(),
                                                                     overload.c_str());
        all.push_back({key, std::string(name) + "." + overload,
                       std::make_unique<NetworkCall>(handle, mode, overload == "data")});
      }
    }
  }
  return all;
}

HostParts recurrent_parts() { return {{"_cudnn_rnn_flatten_weight", make<FlattenWeights>}}; }

}  // namespace operators
