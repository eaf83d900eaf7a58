"""plan/cost/model.py against the bytes that torch really holds.

The model is a Megatron-like GPT in bf16 and fp32, whose saved tensors are counted at their fullest.

The block is Megatron's: fused qkv, scores through softmax and dropout, GeLU, dropout before both residual
additions (Korthikanti et al. 2022, figure 3). Saved tensors are counted by storage, from when autograd packs
them to when it frees them. torch's CPU dropout keeps its mask in the tensor's own type where a GPU (and the
formula) has one byte for two of 16 bits: that is added to the formula here. Stated: what is kept within 1 %;
at the peak of a backward that recomputes the formula is 0 to 45 % too much, since part of the block is freed
by then.
"""

import weakref
from dataclasses import replace

import pytest

from holmes_ext.plan.cost.model import Mode, Model, in_flight, stage_memory, working_bytes

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors: more threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


MODEL = Model(
    layers=3,
    hidden=128,
    heads=4,
    sequence=64,
    vocabulary=512,
    micro_batches=4,
    micro_batch=2,
    tied=False,
)
WITHIN = 0.01


def expected(model, width=2):
    """Return the formula's bytes of all blocks, with masks as wide as torch's CPU has them."""
    size = model.micro_batch * model.sequence * model.hidden
    masks = {"none": 2 + model.heads * model.sequence / model.hidden, "selective": 2, "full": 0}[
        model.recompute
    ]
    return model.layers * (model.costs()[1].kept_bytes + masks * size * width / 2)


class Block(nn.Module):
    def __init__(self, model, recompute):
        super().__init__()
        h, self.heads, self.recompute = model.hidden, model.heads, recompute
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.proj = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def core(self, q, k, v):
        scores = torch.bmm(q, k.transpose(1, 2)) * (q.shape[-1] ** -0.5)
        return torch.bmm(functional.dropout(torch.softmax(scores, -1), 0.1), v)

    def whole(self, x):
        b, s, h = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(b, s, 3, self.heads, h // self.heads)
            .permute(2, 0, 3, 1, 4)
            .reshape(3, b * self.heads, s, -1)
        )
        attended = (
            checkpoint(self.core, q, k, v, use_reentrant=True)
            if self.recompute == "selective"
            else self.core(q, k, v)
        )
        x = x + functional.dropout(
            self.proj(attended.view(b, self.heads, s, -1).transpose(1, 2).reshape(b, s, h)), 0.1
        )
        return x + functional.dropout(self.down(functional.gelu(self.up(self.norm2(x)))), 0.1)

    def forward(self, x):
        return (
            checkpoint(self.whole, x, use_reentrant=True)
            if self.recompute == "full"
            else self.whole(x)
        )


class Stage(nn.Module):
    """Blocks, with the embedding before and the output after them if asked for."""

    def __init__(self, model, first, last):
        super().__init__()
        self.words = nn.Embedding(model.vocabulary, model.hidden) if first else None
        self.places = nn.Embedding(model.sequence, model.hidden) if first else None
        self.blocks = nn.ModuleList(Block(model, model.recompute) for _ in range(model.layers))
        self.norm = nn.LayerNorm(model.hidden) if last else None
        self.head = nn.Linear(model.hidden, model.vocabulary, bias=False) if last else None

    def forward(self, x):
        if self.words is not None:
            x = functional.dropout(self.words(x) + self.places(torch.arange(x.shape[1])), 0.1)
        for block in self.blocks:
            x = block(x)
        if self.head is None:
            return x.float().sum()
        return functional.cross_entropy(
            self.head(self.norm(x)).flatten(0, 1).float(),
            torch.zeros(x.shape[0] * x.shape[1], dtype=torch.long),
        )


class Counter:
    """Bytes of saved tensors alive now and at most, each storage once; parameters do not count."""

    def __init__(self, module):
        self.own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        self.alive, self.bytes, self.peak = {}, 0, 0

    def pack(self, tensor):
        key = tensor.untyped_storage().data_ptr()
        if key in self.own:
            return tensor
        size = tensor.untyped_storage().nbytes()
        if self.alive.setdefault(key, 0) == 0:
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
        self.alive[key] += 1
        holder = _Held(tensor)
        weakref.finalize(holder, self._gone, key, size)
        return holder

    def _gone(self, key, size):
        self.alive[key] -= 1
        if not self.alive[key]:
            self.bytes -= size

    def hooks(self):
        return torch.autograd.graph.saved_tensors_hooks(
            self.pack, lambda held: held.tensor if isinstance(held, _Held) else held
        )


class _Held:
    def __init__(self, tensor):
        self.tensor = tensor


def measured(model, micro_batches=1, first=False, last=False, dtype=torch.bfloat16):
    """Measure the bytes that torch holds.

    Returns:
        (saved after `micro_batches` forwards, peak including one backward)
    """
    torch.manual_seed(0)
    stage = Stage(model, first, last).to(dtype)
    counter, losses = Counter(stage), []
    with counter.hooks():
        for _ in range(micro_batches):
            shape = (model.micro_batch, model.sequence)
            x = (
                torch.zeros(shape, dtype=torch.long)
                if first
                else torch.randn(*shape, model.hidden, dtype=dtype, requires_grad=True)
            )
            losses.append(stage(x))
        kept = counter.bytes
        losses[0].backward()
    return kept, counter.peak


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("heads, sequence", [(4, 64), (8, 128)])
def test_activations_of_blocks(recompute, heads, sequence):
    model = replace(MODEL, recompute=recompute, heads=heads, sequence=sequence)
    kept, _ = measured(model)
    assert kept == pytest.approx(expected(model), rel=WITHIN)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_activations_grow_with_the_micro_batches_under_way(micro_batches):
    kept, _ = measured(MODEL, micro_batches)
    keep = in_flight(0, 4, 1, micro_batches)
    assert keep == micro_batches and kept == pytest.approx(keep * expected(MODEL), rel=WITHIN)


def test_the_whole_model_at_its_peak():
    """Embedding, blocks and output, everything kept."""
    _, peak = measured(MODEL, first=True, last=True)
    embedding, *_, output = MODEL.costs()
    mask = embedding.kept_bytes  # twice as wide here
    assert peak == pytest.approx(
        expected(MODEL) + embedding.kept_bytes + mask + output.kept_bytes, rel=WITHIN
    )


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_never_takes_more_than_the_formula(recompute):
    model = replace(MODEL, recompute=recompute, heads=8, sequence=128)
    _, peak = measured(model)
    none = replace(model, recompute="none")
    working = (
        working_bytes(model)
        + (expected(none) - expected(model)) / model.layers
        - (none.costs()[1].kept_bytes - model.costs()[1].kept_bytes)
    )
    found = expected(model) + working
    assert 0.55 * found <= peak <= found * 1.01


@pytest.mark.parametrize("zero, shards", [(0, 1), (1, 4)])
def test_states(zero, shards):
    """The states of fp32 Adam are weights, gradients and two moments, as torch allocates them.

    ZeRO-1 leaves a rank its share of the moments.
    """
    model = replace(MODEL, activation_width=4, gradient_width=4, state_bytes=16)
    stage = Stage(model, True, True)
    optimizer = torch.optim.Adam(stage.parameters())
    stage(torch.zeros(2, model.sequence, dtype=torch.long)).backward()
    optimizer.step()

    def size(tensors):
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    found = stage_memory(model, model.costs(), Mode(zero, has_pipeline=False), shards)
    assert found.weights == pytest.approx(size(stage.parameters()), rel=1e-3)
    assert found.gradients == pytest.approx(
        size(parameter.grad for parameter in stage.parameters()), rel=1e-3
    )
    moments = size(
        value for state in optimizer.state.values() for value in state.values() if value.dim()
    )
    assert found.optimizer == pytest.approx(moments / shards, rel=1e-3)


def test_under_way():
    """With 1F1B, stage s of p has p - s micro-batches under way.

    Interleaved: the first stage keeps (1 + (p - 1) / (p v)) p micro-batches, as in arXiv
    2104.04473, section 2.2 and 2205.05198.
    """
    assert [in_flight(stage, 4, 1, 8) for stage in range(4)] == [4, 3, 2, 1] and in_flight(
        0, 4, 1, 2
    ) == 2
    assert in_flight(0, 4, 2, 100) == pytest.approx(4 * (1 + 3 / (4 * 2)))
    assert in_flight(0, 4, 2, 3) == 3
