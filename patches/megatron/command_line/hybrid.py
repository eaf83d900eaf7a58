"""Counts the parameters and FLOPs of Megatron's hybrid models, whose layers are of several kinds.

A pattern has a letter for each layer (megatron/core/ssm/mamba_hybrid_layer_allocation.py):

    M    Mamba-2         mamba_mixer.py: z, x, B, C and dt from one projection, a convolution, the scan, and a
                         projection back
    *    attention       no MLP
    -    MLP             no attention
    E    experts         router, experts, and a shared expert if there is one

holmes predicts no step of such a model. The numbers are for the message that refuses it, so that a model of
the same size can be given. The FLOPs are those of num_floating_point_operations() in
megatron/training/training.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAMBA, ATTENTION, MLP, EXPERTS = "M*-E"
_NAMES = {MAMBA: "Mamba", ATTENTION: "attention", MLP: "MLP", EXPERTS: "expert"}
_PATTERN_FLAGS = ("--hybrid-layer-pattern", "--hybrid-override-pattern")
#: Flags of layers that are not counted here.
_UNCOUNTED_FLAGS = ("--multi-latent-attention", "--mtp-num-layers", "--moe-latent-size")
#: Width inside a Mamba layer / hidden size, if --mamba-num-heads does not give it.
_EXPANSION = 2
_CONVOLUTION = 4  # tokens that the convolution of a Mamba layer sees
_FORWARD_AND_BACKWARD = 3  # passes of a step, in units of a forward pass
_BILLION = 1e9


@dataclass(frozen=True)
class HybridModel:
    """A model with layers of several kinds (Mamba, attention, MLP, experts), as its flags describe it."""

    layers: Mapping[str, int]  # letter of a kind -> number of layers
    hidden: int
    ffn: int
    heads: int
    key_value_heads: int
    head_size: int
    vocabulary: int  # padded
    max_positions: int = 0  # 0 without learned positions
    gated: bool = False
    bias: bool = True
    tied: bool = True
    norm_vectors: int = 2  # parameters of a norm / hidden size: 2 of LayerNorm, 1 of RMSNorm
    state: int = 128
    mamba_head_size: int = 64
    mamba_groups: int = 8
    mamba_heads: int = 0  # 0: as many as the expansion gives
    experts: int = 0
    experts_per_token: int = 2
    expert_ffn: int = 0
    shared_ffn: int = 0
    sequences: int = 0  # of a step; 0: not known
    tokens_of_sequence: int = 0

    @property
    def scan_heads(self) -> int:
        """Number of heads of a Mamba-2 layer's scan."""
        return self.mamba_heads or _EXPANSION * self.hidden // self.mamba_head_size

    @property
    def inner(self) -> int:
        """Width of the activations inside a Mamba-2 layer."""
        return self.scan_heads * self.mamba_head_size

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole hybrid model."""
        norm = self.norm_vectors * self.hidden
        of_kind = {
            MAMBA: self._mamba_parameters(),
            ATTENTION: self._attention_parameters(),
            MLP: self._mlp_parameters(self.ffn),
            EXPERTS: self._expert_parameters(),
        }
        blocks = sum(number * (norm + of_kind[kind]) for kind, number in self.layers.items())
        embedding = (self.vocabulary + self.max_positions) * self.hidden
        output = 0 if self.tied else self.vocabulary * self.hidden
        return blocks + embedding + norm + output

    def _mamba_parameters(self) -> int:
        groups_width = 2 * self.mamba_groups * self.state  # of B and C
        projection_in = self.hidden * (2 * self.inner + groups_width + self.scan_heads)
        convolution = (self.inner + groups_width) * (_CONVOLUTION + 1)  # with its bias
        scan = 3 * self.scan_heads + self.inner  # A, D and the bias of dt; the norm of the result
        projection_out = self.inner * self.hidden
        return projection_in + convolution + scan + projection_out

    def _attention_parameters(self) -> int:
        query_width = self.heads * self.head_size
        key_value_width = 2 * self.key_value_heads * self.head_size
        weights = self.hidden * (query_width + key_value_width) + query_width * self.hidden
        biases = query_width + key_value_width + self.hidden if self.bias else 0
        return weights + biases

    def _mlp_parameters(self, ffn: int) -> int:
        width = 2 * ffn if self.gated else ffn
        weights = self.hidden * width + ffn * self.hidden
        biases = width + self.hidden if self.bias else 0
        return weights + biases

    def _expert_parameters(self) -> int:
        router = self.hidden * self.experts
        shared = self._mlp_parameters(self.shared_ffn) if self.shared_ffn else 0
        return router + self.experts * self._mlp_parameters(self.expert_ffn) + shared

    @property
    def flops_of_step(self) -> float:
        """FLOPs of a training step, without those of recomputation, as Megatron counts them."""
        tokens = self.sequences * self.tokens_of_sequence
        of_kind = {
            MAMBA: self._mamba_flops_of_token(),
            ATTENTION: self._attention_flops_of_token(),
            MLP: self._mlp_flops_of_token(self.ffn),
            EXPERTS: self._mlp_flops_of_token(
                self.experts_per_token * self.expert_ffn + self.shared_ffn
            ),
        }
        output = 2 * self.hidden * self.vocabulary
        of_token = output + sum(number * of_kind[kind] for kind, number in self.layers.items())
        return _FORWARD_AND_BACKWARD * tokens * of_token

    def _mamba_flops_of_token(self) -> float:
        # Megatron counts twice the hidden size as the width inside, whatever --mamba-num-heads says.
        inner = _EXPANSION * self.hidden
        projected = 2 * inner + 2 * self.mamba_groups * self.state + self.scan_heads
        scan = 7 * inner * self.state
        return 2 * self.hidden * projected + scan + 2 * inner * self.hidden

    def _attention_flops_of_token(self) -> float:
        query_width = self.heads * self.head_size
        key_value_share = self.key_value_heads / self.heads  # width of keys / width of queries
        # 2 FLOPs a weight: of the projections of queries and outputs, and of those of keys and values.
        projections = 4 * query_width * self.hidden * (1 + key_value_share)
        # Scores, and the sum of values weighted by them. Either takes 2 FLOPs for each element of the query
        # and each earlier token. With a causal mask these are half of the sequence on average.
        scores = 2 * self.tokens_of_sequence * query_width
        return projections + scores

    def _mlp_flops_of_token(self, ffn: int) -> float:
        matrices = 3 if self.gated else 2
        return 2 * matrices * self.hidden * ffn

    def __str__(self) -> str:
        layers = ", ".join(
            f"{self.layers[kind]} {name}" for kind, name in _NAMES.items() if kind in self.layers
        )
        text = f"{layers} layers, {self.parameters / _BILLION:.4g}e9 parameters"
        return f"{text}, {self.flops_of_step:.4g} FLOPs a step" if self.flops_of_step else text


def hybrid_model(
    flags: Mapping[str, Sequence[str]], settings: Mapping[str, Any], vocabulary: int
) -> HybridModel | None:
    """Return the hybrid model that the flags of Megatron-LM describe.

    The result is None if its parameters cannot be counted: the flags give no pattern or ratio of the kinds
    of layers, a size is missing, or there is a flag of _UNCOUNTED_FLAGS.

    Args:
        flags: Flag of the command line -> the words that follow it.
        settings: Name of a setting -> value, such as "hidden" -> 4096.
        vocabulary: Tokens of the vocabulary, padded.
    """
    layers = layers_of_kinds(flags, settings.get("layers", 0))
    has_sizes = all(settings.get(name) for name in ("hidden", "heads"))
    if not layers or not has_sizes or any(flag in flags for flag in _UNCOUNTED_FLAGS):
        return None
    hidden = settings["hidden"]
    heads = settings["heads"]
    experts = max(settings.get("experts", [0]))
    if EXPERTS in layers and not experts:
        return None
    gated = settings.get("gated", False) or settings.get("geglu", False)
    ffn = settings.get("ffn") or 4 * hidden
    if MLP in layers and gated and not settings.get("ffn"):
        return None  # the default width of a gated MLP differs between versions
    has_learned_positions = settings.get("positions", "learned") == "learned"
    return HybridModel(
        layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        key_value_heads=settings.get("query_groups", heads) if settings.get("grouped") else heads,
        head_size=settings.get("head_size") or hidden // heads,
        vocabulary=vocabulary,
        max_positions=settings.get("max_positions", 0) if has_learned_positions else 0,
        gated=gated,
        bias=settings.get("bias", True),
        tied=settings.get("tied", True),
        norm_vectors=1 if "RMSNorm" in flags.get("--normalization", ()) else 2,
        state=_number(flags, "--mamba-state-dim", default=128),
        mamba_head_size=_number(flags, "--mamba-head-dim", default=64),
        mamba_groups=_number(flags, "--mamba-num-groups", default=8),
        mamba_heads=_number(flags, "--mamba-num-heads", default=0),
        experts=experts,
        experts_per_token=settings.get("experts_per_token", 2),
        expert_ffn=settings.get("expert_ffn", ffn),
        shared_ffn=settings.get("shared_ffn", 0),
        sequences=settings.get("global_batch", 0),
        tokens_of_sequence=settings.get("sequence", 0),
    )


def layers_of_kinds(flags: Mapping[str, Sequence[str]], layer_count: int) -> dict[str, int]:
    """Count the layers of each kind in a hybrid model: letter of the kind -> number of layers.

    The result is {} if the flags have other letters, or no pattern. Without a pattern,
    --hybrid-attention-ratio and --hybrid-mlp-ratio divide the layers.

    Args:
        flags: Flag of the command line -> the words that follow it.
        layer_count: Number of layers (--num-layers), 0 if it is not given.
    """
    for flag in _PATTERN_FLAGS:
        pattern = "".join(flags.get(flag, ())).replace("|", "")  # "|" divides pipeline stages
        if pattern:
            return dict(Counter(pattern)) if set(pattern) <= set(_NAMES) else {}
    ratios = {
        ATTENTION: flags.get("--hybrid-attention-ratio", ()),
        MLP: flags.get("--hybrid-mlp-ratio", ()),
    }
    if not any(ratios.values()) or not layer_count:
        return {}
    try:
        counts = {
            kind: round(layer_count * float(words[0])) for kind, words in ratios.items() if words
        }
    except ValueError:
        return {}

    # Attention gets its layers first, MLPs replace Mamba layers that are left.
    attention = counts.get(ATTENTION, 0)
    counts[MLP] = min(counts.get(MLP, 0), layer_count - attention)
    counts[MAMBA] = layer_count - attention - counts[MLP]
    return {kind: count for kind, count in counts.items() if count > 0}


def _number(flags: Mapping[str, Sequence[str]], flag: str, default: int) -> int:
    """Read the number that follows a flag; the default if the flag is missing or no number follows."""
    text = "".join(flags.get(flag, ())[:1])
    return int(text) if text.isdecimal() else default
