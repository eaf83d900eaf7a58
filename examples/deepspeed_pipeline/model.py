"""A byte-level GPT as the flat list of layers that deepspeed.pipe.PipelineModule cuts into stages.

    tokens -> Embedding -> Positions -> Block x layers -> LayerNorm -> Head -> logits
    [batch, sequence]           [batch, sequence, hidden]              [batch, sequence, 256]

A layer is a LayerSpec: only the stage that owns it builds it. Tied, the head reads the embedding's weight
through a TiedLayerSpec; positions are a layer of their own, because DeepSpeed copies a tied layer as a whole
to both stages.
"""

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn
from torch.nn import functional as F

VOCABULARY = 256  # bytes
INIT_STD = 0.02


class Embedding(nn.Module):
    """A vector for each byte: int64 [batch, sequence] -> [batch, sequence, hidden]."""

    def __init__(self, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, hidden).normal_(std=INIT_STD))

    def forward(self, tokens):
        return F.embedding(tokens, self.weight)


class Positions(nn.Module):
    """Adds a learned vector for each place in the sequence: [batch, sequence, hidden] -> the same."""

    def __init__(self, sequence: int, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sequence, hidden).normal_(std=INIT_STD))

    def forward(self, x):
        return x + self.weight[: x.shape[1]]


class Block(nn.Module):
    """A pre-norm transformer block with causal self-attention: [batch, sequence, hidden] -> the same.

    layers: how many blocks the model has; the residual outputs start smaller by its root (GPT-2).
    """

    def __init__(self, hidden: int, heads: int, layers: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp_in = nn.Linear(hidden, 4 * hidden)
        self.mlp_out = nn.Linear(4 * hidden, hidden)
        residual_std = INIT_STD / (2 * layers) ** 0.5
        for linear, std in (
            (self.qkv, INIT_STD),
            (self.attention_out, residual_std),
            (self.mlp_in, INIT_STD),
            (self.mlp_out, residual_std),
        ):
            nn.init.normal_(linear.weight, std=std)
            nn.init.zeros_(linear.bias)

    def forward(self, x):
        batch, sequence, hidden = x.shape
        q, k, v = (
            self.qkv(self.attention_norm(x))
            .view(batch, sequence, 3, self.heads, hidden // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        attended = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(batch, sequence, hidden)
        )
        x = x + self.attention_out(attended)
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class Head(nn.Module):
    """Logits of the next byte: [batch, sequence, hidden] -> [batch, sequence, 256]."""

    def __init__(self, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, hidden).normal_(std=INIT_STD))

    def forward(self, x):
        return F.linear(x, self.weight)


def tied_head(embedding: Embedding, x):
    """The Head's computation with the Embedding's weight."""
    return F.linear(x, embedding.weight)


def next_byte_loss(logits, labels):
    """Mean cross-entropy in nats, in float32: logits [batch, sequence, 256], labels int64 [batch,
    sequence]."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def layer_specs(layers: int, hidden: int, heads: int, sequence: int, tied: bool) -> list[LayerSpec]:
    """The model, layer by layer."""
    if tied:
        first = TiedLayerSpec("embedding", Embedding, hidden, tied_weight_attr="weight")
        last = TiedLayerSpec(
            "embedding", Embedding, hidden, tied_weight_attr="weight", forward_fn=tied_head
        )
    else:
        first, last = LayerSpec(Embedding, hidden), LayerSpec(Head, hidden)
    blocks = [LayerSpec(Block, hidden, heads, layers) for _ in range(layers)]
    return [
        first,
        LayerSpec(Positions, sequence, hidden),
        *blocks,
        LayerSpec(nn.LayerNorm, hidden),
        last,
    ]


def count_parameters(specs: list[LayerSpec]) -> int:
    """Parameters of the whole model, tied ones once."""
    distinct = {getattr(spec, "key", index): spec for index, spec in enumerate(specs)}
    with torch.device("meta"):
        return sum(p.numel() for spec in distinct.values() for p in spec.build().parameters())
