"""A byte-level GPT as the flat list of layers that deepspeed.pipe.PipelineModule cuts into stages.

    tokens -> Embedding -> Positions -> Block x layers -> LayerNorm -> Head -> logits
    [batch, sequence]           [batch, sequence, hidden]              [batch, sequence, 256]

A layer is a LayerSpec, so it is built only by the stage that runs it. If the weights are tied, the head uses
the embedding's weight through a TiedLayerSpec. Positions are a separate layer, because DeepSpeed copies a
tied layer as a whole to both stages.
"""

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn
from torch.nn import functional

VOCABULARY = 256  # bytes
INIT_STD = 0.02


class Embedding(nn.Module):
    """Embedding of bytes: int64 [batch, sequence] -> [batch, sequence, hidden]."""

    def __init__(self, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, hidden).normal_(std=INIT_STD))

    def forward(self, tokens):
        return functional.embedding(tokens, self.weight)


class Positions(nn.Module):
    """Layer that adds a learned vector for each position: [batch, sequence, hidden] -> the same."""

    def __init__(self, sequence: int, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sequence, hidden).normal_(std=INIT_STD))

    def forward(self, x):
        return x + self.weight[: x.shape[1]]


class Block(nn.Module):
    """Pre-norm transformer block with causal self-attention.

    Input and output have the shape [batch, sequence, hidden].
    """

    def __init__(self, hidden: int, heads: int, layers: int):
        """Initialize the weights as GPT-2 does.

        Args:
            hidden: Width of a token's vector.
            heads: Attention heads.
            layers: Number of blocks in the model. Outputs that are added to the residual stream start smaller
                by the square root of it.
        """
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
        qkv = self.qkv(self.attention_norm(x))
        qkv = qkv.view(batch, sequence, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, sequence, hidden of a head]
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))


class Head(nn.Module):
    """Linear layer: [batch, sequence, hidden] -> logits of the next byte [batch, sequence, 256]."""

    def __init__(self, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, hidden).normal_(std=INIT_STD))

    def forward(self, x):
        return functional.linear(x, self.weight)


def tied_head(embedding: Embedding, x):
    """Return logits of the next byte, computed with the weight of the embedding."""
    return functional.linear(x, embedding.weight)


def next_byte_loss(logits, labels):
    """Return the mean cross-entropy in nats, computed in float32.

    Args:
        logits: [batch, sequence, 256].
        labels: int64 [batch, sequence].
    """
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def layer_specs(layers: int, hidden: int, heads: int, sequence: int, tied: bool) -> list[LayerSpec]:
    """Return the layers of the model, in order, for DeepSpeed's PipelineModule.

    They are the embedding of bytes, position vectors, the transformer blocks, a norm, and the head.

    Args:
        layers: Number of transformer blocks.
        hidden: Width of a token's vector.
        heads: Attention heads.
        sequence: Bytes in a sample.
        tied: Whether the head uses the embedding's weight.
    """
    if tied:
        first = TiedLayerSpec("embedding", Embedding, hidden, tied_weight_attr="weight")
        last = TiedLayerSpec(
            "embedding", Embedding, hidden, tied_weight_attr="weight", forward_fn=tied_head
        )
    else:
        first = LayerSpec(Embedding, hidden)
        last = LayerSpec(Head, hidden)
    # Block needs the number of all blocks, because its initial weights are scaled by it.
    blocks = [LayerSpec(Block, hidden, heads, layers) for _ in range(layers)]
    return [
        first,
        LayerSpec(Positions, sequence, hidden),
        *blocks,
        LayerSpec(nn.LayerNorm, hidden),
        last,
    ]


def count_parameters(specs: list[LayerSpec]) -> int:
    """Return the number of parameters of the whole model; tied parameters count once."""
    # Tied layers have the same key.
    spec_of_key = {getattr(spec, "key", index): spec for index, spec in enumerate(specs)}
    count = 0
    with torch.device("meta"):
        for spec in spec_of_key.values():
            for parameter in spec.build().parameters():
                count += parameter.numel()
    return count
