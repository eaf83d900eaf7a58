"""Tests that training on an emulated GPU gives the same losses and weights as on the CPU.

All bits must be equal.
"""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Recurrent(nn.Module):
    def __init__(self, kind: type, **options):
        super().__init__()
        self.recurrent = kind(8, 16, num_layers=2, batch_first=True, **options)
        self.head = nn.LazyLinear(4)

    def forward(self, x):
        return self.head(self.recurrent(x)[0]).flatten(1)


class Transformer(nn.Module):
    def __init__(self, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, **options)
        self.embedding = nn.Embedding(50, 32)
        self.head = nn.Linear(32, 50)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.layers(self.embedding(tokens), mask=mask, is_causal=True)
        return self.head(hidden).flatten(0, 1)


class RmsNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.Linear(8, 32)
        self.norm = nn.RMSNorm(32)
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(nn.functional.silu(self.norm(self.before(x))))


def mlp():
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


def convolutional():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.GroupNorm(2, 8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def vectors():
    return torch.randn(16, 8), torch.randint(0, 4, (16,))


def sequences():
    return torch.randn(4, 6, 8), torch.randint(0, 24, (4,))


def tokens():
    data = torch.randint(0, 50, (4, 13))
    return data[:, :-1], data[:, 1:].flatten()


def images():
    return torch.randn(6, 3, 8, 8), torch.randint(0, 4, (6,))


MODELS = {
    "mlp": (mlp, vectors),
    "rms norm": (RmsNormed, vectors),
    "convolutions": (convolutional, images),
    "transformer": (Transformer, tokens),
    "transformer, norm first": (lambda: Transformer(norm_first=True, activation="gelu"), tokens),
    "lstm": (lambda: Recurrent(nn.LSTM), sequences),
    "lstm, both directions": (lambda: Recurrent(nn.LSTM, bidirectional=True), sequences),
    "gru": (lambda: Recurrent(nn.GRU), sequences),
    "rnn": (lambda: Recurrent(nn.RNN), sequences),
}
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "AdamW, one by one": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
    "Adam, amsgrad": lambda parameters: torch.optim.Adam(
        parameters, lr=1e-2, amsgrad=True, foreach=True
    ),
    "SGD": lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True
    ),
    "SGD, fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, foreach=True),
    "Adagrad, fused": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, fused=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, foreach=True),
    "Adadelta": lambda parameters: torch.optim.Adadelta(parameters, foreach=True),
    "Adamax": lambda parameters: torch.optim.Adamax(parameters, foreach=True),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, foreach=True),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters, foreach=True),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, foreach=True),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, foreach=True),
    "LBFGS": lambda parameters: torch.optim.LBFGS(
        parameters, max_iter=3, line_search_fn="strong_wolfe"
    ),
}


def losses(model, optimizer, batch, device, dtype=None, steps=6):
    """Train on a device, and return the losses and the weights after the last step."""
    model = copy.deepcopy(model).to(device)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    inputs, labels = (tensor.to(device) for tensor in batch)

    def closure():
        optimizer.zero_grad()
        with torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(model(inputs).float(), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        return loss

    # No step waits for the device: the losses are read at the end.
    step_losses = [optimizer.step(closure).detach() for _ in range(steps)]
    weights = [parameter.detach().cpu() for parameter in model.parameters()]
    return torch.stack(step_losses).tolist(), weights


def assert_equal(model, optimizer, batch, dtype=None):
    model(batch[0])  # initializes lazy parameters
    losses_on_cpu, weights_on_cpu = losses(model, optimizer, batch, "cpu", dtype)
    losses_on_gpu, weights_on_gpu = losses(model, optimizer, batch, "cuda", dtype)
    assert losses_on_gpu == losses_on_cpu
    for left, right in zip(weights_on_cpu, weights_on_gpu, strict=True):
        assert torch.equal(left, right)
    assert losses_on_cpu[-1] < losses_on_cpu[0]


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    model, batch = MODELS[name]
    assert_equal(model(), "AdamW", batch())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    assert_equal(mlp(), name, vectors())


@pytest.mark.parametrize("name", ["mlp", "convolutions", "transformer", "rms norm"])
def test_in_bfloat16(name):
    model, batch = MODELS[name]
    inputs, labels = batch()
    if inputs.is_floating_point():
        inputs = inputs.bfloat16()
    assert_equal(model().bfloat16(), "AdamW", (inputs, labels))


def test_mixed_precision_with_a_loss_scaler():
    """Autocast and GradScaler have the same results on the GPU as on the CPU.

    The lists of operators that autocast casts differ between devices, so the model has only a matrix
    product in float16 and a loss in float32, which are the same on both.
    """
    weight, inputs = torch.randn(8, 8), torch.randn(4, 8)
    results = []
    for device in "cpu", "cuda":
        parameter = nn.Parameter(weight.clone().to(device))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        scaler = torch.amp.GradScaler(device, init_scale=1024.0)
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.float16):
                loss = (inputs.to(device) @ parameter).float().square().mean()
            if step == 2:
                loss = loss * float("inf")  # the scaler skips this step
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([parameter], 1.0)
            scaler.step(optimizer)
            scaler.update()
        results.append((parameter.detach().cpu(), scaler.get_scale()))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] == 512.0


def test_recomputation_draws_the_same_dropout():
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 16)).cuda()
    inputs = torch.randn(8, 16, device="cuda", requires_grad=True)
    torch.cuda.manual_seed(7)
    layer(inputs).square().sum().backward()
    plain, inputs.grad = inputs.grad, None
    torch.cuda.manual_seed(7)
    checkpoint(layer, inputs, use_reentrant=False).square().sum().backward()
    assert torch.equal(plain, inputs.grad)


def test_saved_and_loaded(tmp_path):
    model = mlp().cuda()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", map_location="cpu")
    assert all(torch.equal(loaded[name], value.cpu()) for name, value in model.state_dict().items())
    again = torch.load(tmp_path / "model.pt")
    assert all(value.is_cuda for value in again.values())


def test_two_gpus_in_one_process():
    """Autograd, which runs a thread for each device, works with two GPUs in one process."""
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    inputs = torch.randn(4, 8)
    second(first(inputs)).square().sum().backward()
    expected = first.weight.grad.clone()
    first.zero_grad()
    on_first, on_second = copy.deepcopy(first).to("cuda:0"), copy.deepcopy(second).to("cuda:1")
    on_second(on_first(inputs.to("cuda:0")).to("cuda:1")).square().sum().backward()
    assert torch.equal(on_first.weight.grad.cpu(), expected)
