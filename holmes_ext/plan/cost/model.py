"""Cost model of a GPT: parameters, FLOPs, bytes sent and memory of every layer.

A model is a list of layers. A pipeline cuts the list between blocks; only blocks count as "layers":

    embedding | block 0 | block 1 | ... | block N-1 | output
    stays with the first stage            stays with the last stage

The formulas use these letters:

    b   sequences in a micro-batch      h   hidden size         a   attention heads
    s   tokens in a sequence            V   vocabulary size     t   tensor-parallel size

    parameters   block: 12 h^2 + 13 h; embedding: (V + s) h
                 (Narayanan et al. 2021, arXiv 2104.04473, equation 2)
    FLOPs        forward: 24 b s h^2 + 4 b s^2 h in a block, 2 b s h V in the output layer. Backward: twice as
                 many, and the forward again if the block is recomputed (same paper, appendix and equation 3)
    activations  s b h (10 + 24 / t + 5 a s / (h t)) bytes in a block, in 16 bits. "selective" recomputation
                 removes the last term; "full" recomputation leaves 2 s b h
                 (Korthikanti et al. 2022, arXiv 2205.05198, equations 2 and 5, table 2)
    flash        FlashAttention removes the last term of the activations too. Its backward pass has 5 matrix
                 products over the sequence (the forward pass has 2): 4 gradients, and the scores again
                 (Dao et al. 2022, arXiv 2205.14135, algorithm 4)

The 24 of the activations is 4 for query and output, 4 for keys and values, and 16 for an MLP of width 4 h.
Each of these terms grows with the width of its matrices; SwiGLU multiplies that of the MLP by 6 / 4.

Special cases:

    tied embedding        The output layer uses the embedding's weight. The model has no more parameters, but
                          the last stage keeps a copy, and the first and last stage all-reduce its gradient.
    sequence parallelism  Divides the activations, kept or sent to the next stage, by t (arXiv 2205.05198,
                          equation 4).
    latent attention      Queries, keys and values are computed from compressed vectors (DeepSeek-V2, arXiv
                          2405.04434): other parameters and FLOPs.
    experts               A token passes through `experts_per_token` expert MLPs. If only some blocks have
                          experts, every block counts as the mean of all blocks.

Memory is the largest amount that a rank of a pipeline stage holds at any time:

    weights, gradients, optimizer   With Adam in 16 bits 2, 2 to 6, and 12 bytes a parameter. ZeRO 1 divides
                                    the optimizer's part by the data-parallel size, ZeRO 2 the gradients
                                    too, ZeRO 3 all of it. Engines differ: DeepSpeed's BF16_Optimizer divides
                                    the optimizer's part at ZeRO 0 (patches/deepspeed/optimizers.py)
    activations                     bytes that each layer keeps per micro-batch x micro-batches in flight
    working                         activations of the layer that is recomputed at the moment, logits and
                                    their gradient, and gradient buckets of separate memory (plan/buckets.py)

Not counted: fragmentation in the allocator, NCCL's buffers and the CUDA context.
tests/plan/cost/test_memory.py compares the result with the bytes that torch allocates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from holmes_ext.cluster.gpus import accelerator_of
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.document import Table, load_toml
from holmes_ext.errors import HolmesError
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.workload import Workload
from holmes_ext.words import counted

RECOMPUTE = ("none", "selective", "full")
POSITIONS = ("learned", "none")
#: Numbers in a model file that are too large to be true.
_MOST_LAYERS = 100_000  # every plan holds the cost of each layer
_MOST_ELEMENTS = 10**12
_MOST_BYTES_PER_PARAMETER = 1e6
_TOO_LARGE = 1e30  # FLOP/s or bytes
_FP32_BYTES = 4  # of a number in 32 bits


#: Parts of the training state, in the order in which ZeRO stages 1, 2 and 3 shard them.
ZERO_ORDER = ("optimizer", "gradients", "weights")


class Mode(NamedTuple):
    """ZeRO stage of a job, and whether the job has pipeline parallelism.

    The bytes that an engine keeps for a parameter depend on both. For example, DeepSpeed in bf16 at
    ZeRO 0 may shard optimizer states with a pipeline, but not without one.
    """

    zero: int
    has_pipeline: bool


@dataclass(frozen=True)
class StateBytes:
    """Bytes of GPU memory for each parameter of the model, by part of the training state.

    Offloaded parts are on the host, and have 0 bytes here.
    """

    weights: float
    gradients: float
    optimizer: float
    #: Parts that are divided among the data-parallel ranks, out of ZERO_ORDER.
    sharded: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """Return the bytes of weights, gradients and optimizer for a parameter, as if none were sharded."""
        return self.weights + self.gradients + self.optimizer

    @property
    def sharded_bytes(self) -> float:
        """Return the bytes of the sharded parts for a parameter, on all data-parallel ranks together.

        Example: 12 for Adam in 16 bits at ZeRO 1. With 8 ranks, each of them holds 12 / 8.
        """
        return sum(self.bytes_of(part) for part in self.sharded)

    def bytes_of(self, part: str) -> float:
        """Return the bytes that a part of the training state needs for each parameter of the model.

        Args:
            part: "weights", "gradients" or "optimizer".
        """
        part_bytes: float = getattr(self, part)
        return part_bytes


def sharded_by(zero: int) -> tuple[str, ...]:
    """Return the parts of the training state that a ZeRO stage shards.

    For example "optimizer" and "gradients" for stage 2.
    """
    return ZERO_ORDER[:zero]


@dataclass(frozen=True)
class Layer:
    """Computation, memory and communication of a layer on a rank, for a micro-batch."""

    kind: str  # "embedding", "block" or "output"
    #: Number of elements of each parameter on this rank, in the order of the forward pass, without experts.
    #: The gradients become final in the reverse order.
    tensors: tuple[float, ...]
    forward_flops: float
    backward_flops: float
    activation_bytes: float  # sent to the next stage if a stage ends after this layer
    kept_bytes: float  # activations kept from the forward to the backward pass
    #: Bytes that tensor, context and expert groups exchange, forward and backward together (see Workload).
    tensor_bytes: float = 0.0
    context_bytes: float = 0.0
    expert_bytes: float = 0.0
    expert_parameters: float = 0.0  # parameters in experts on this rank
    #: Part of backward_flops that computes weight gradients. No other stage waits for these.
    weight_flops: float = 0.0

    @cached_property
    def parameters(self) -> float:
        """Return the number of parameters on this rank, experts included."""
        return sum(self.tensors) + self.expert_parameters

    def reduced(self, ranks: int, expert: int) -> tuple[float, ...]:
        """Return the size of each gradient, in elements, for an all-reduce among all `ranks` ranks.

        With experts there is another size at the end. Experts are reduced among only `ranks / expert`
        ranks, so it is the number of elements that would cause the same traffic in a ring of all ranks.

        Args:
            ranks: Number of ranks that reduce the gradients of this layer's dense parameters.
            expert: Expert-parallel size.
        """
        if not self.expert_parameters:
            return self.tensors
        expert_ranks = max(1, ranks // expert)
        # A ring all-reduce among n ranks sends 2 (n - 1) / n of the bytes. The factor 2 cancels out.
        traffic_ratio = 1.0  # traffic of an element among expert_ranks / traffic among all ranks
        if ranks > 1:
            traffic_ratio = (expert_ranks - 1) / expert_ranks / ((ranks - 1) / ranks)
        return (*self.tensors, self.expert_parameters * traffic_ratio)


@dataclass(frozen=True)
class Gpu:
    """Speed, memory and intra-node link of a GPU."""

    flops: float = 150e12  # FLOP/s that training reaches, not the peak of the data sheet
    memory_bytes: float = 0.0  # 0: no limit is known
    #: Bits/s to the other GPUs of the node (NVLink), each way. 0: not known; that traffic then costs nothing.
    link_bps: float = 0.0
    has_bfloat16: bool = True  # whether it computes in bfloat16; else in float16 and float32 only

    def __post_init__(self) -> None:
        if not 0 < self.flops < _TOO_LARGE:
            raise HolmesError(f"gpu: flops is {self.flops}; it must be above 0, and finite")
        if not 0 <= self.memory_bytes < _TOO_LARGE:
            raise HolmesError(
                f"gpu: memory_bytes is {self.memory_bytes}; it must be 0 (no limit) or more, and finite"
            )


def _key(text: str, default: Any = MISSING, training: bool = False) -> Any:
    """Return a dataclass field of Model that a model file can set.

    Args:
        text: Description of the key, for the documentation.
        default: Value if the file lacks the key. Without a default, the key is required.
        training: Whether the key stands in the table [training] of the file.
    """
    return field(default=default, metadata={"text": text, "training": training})


class _BlockWidths(NamedTuple):
    """Widths of the matrices of a transformer block; with experts, the mean of all blocks."""

    query: float  # heads x head size
    key_value: float  # key-value heads x head size
    dense_mlp: float  # inner width of the MLP that every token passes through
    expert_mlp: int  # inner width of an expert
    token_mlp: float  # inner widths of all MLPs that a token passes through, added up
    expert_share: float  # part of the blocks that have experts
    active_experts: int  # experts that a token passes through


class _BlockFlops(NamedTuple):
    """FLOPs of a transformer block on a rank, for a micro-batch."""

    forward: float
    scores: float  # part of `forward` for attention scores, and for their product with the values
    recomputed: float  # computed again in the backward pass


class _BlockTraffic(NamedTuple):
    """Bytes that the groups of a rank exchange for a block and a micro-batch, both passes together."""

    tensor: float
    context: float
    expert: float


@dataclass(frozen=True)
class Model:
    """Shape of a GPT and its training settings, as in a model file; 0 stands for an optional size."""

    layers: int = _key("transformer blocks")
    hidden: int = _key("hidden size: the width of an activation")
    heads: int = _key("attention heads")
    sequence: int = _key("tokens per sequence")
    vocabulary: int = _key("tokens in the vocabulary")
    name: str = _key("its name in tables and messages", "model")
    ffn: int = _key("width inside the MLP; 0: 4 x hidden", 0)
    groups: int = _key("key-value heads; 0: as many as heads", 0)
    head_size: int = _key("width of a head; 0: hidden / heads", 0)
    key_value_rank: int = _key(
        "width of the compressed keys and values of multi-head latent attention; 0: no such attention",
        0,
    )
    query_rank: int = _key(
        "width of the compressed query of latent attention; 0: not compressed", 0
    )
    rotary_size: int = _key(
        "width of a head's position part in latent attention, beside head_size", 0
    )
    value_size: int = _key("width of a head's value in latent attention; 0: head_size", 0)
    gated: bool = _key("the MLP is gated (SwiGLU)", False)
    bias: bool = _key("linear layers and norms have a bias", True)
    tied: bool = _key("the output layer shares the embedding's weight", True)
    positions: str = _key(
        '"learned" (a table of max_positions rows), or "none" (rotary ones have no parameters)',
        "learned",
    )
    max_positions: int = _key("0: sequence", 0)
    experts: int = _key("experts in each block that has them; 0: none", 0)
    experts_per_token: int = _key("experts per token (top-k)", 2)
    expert_ffn: int = _key("width inside an expert; 0: ffn", 0)
    shared_ffn: int = _key("width inside the shared expert; 0: none", 0)
    expert_layers: int = _key("blocks with experts; 0: all", 0)
    micro_batch: int = _key("sequences per micro-batch", 1, training=True)
    micro_batches: int = _key(
        "micro-batches per step on each rank; give this or global_batch", 0, training=True
    )
    global_batch: int = _key("sequences per step over all ranks", 0, training=True)
    recompute: str = _key('"none", "selective" or "full"', "none", training=True)
    flash: bool = _key("attention keeps no scores", False, training=True)
    sequence_parallel: bool = _key(
        "norms and dropout are split over the tensor ranks", False, training=True
    )
    activation_width: int = _key("bytes per activation element", 2, training=True)
    gradient_width: int = _key("bytes per gradient element", 4, training=True)
    state_bytes: float = _key(
        "bytes per parameter on each rank: weight, gradient, optimizer", 18.0, training=True
    )
    sharded_bytes: float = _key(
        "the same, sharded over the data size: 12, with state_bytes 6, for Adam under ZeRO 1",
        0.0,
        training=True,
    )
    #: Tokens before padding. Megatron pads them to a multiple of vocabulary_multiple x the tensor-parallel
    #: size. 0: `vocabulary` holds for every tensor-parallel size.
    vocabulary_tokens: int = 0
    vocabulary_multiple: int = 0
    gpu: Gpu = Gpu()
    gpus: dict[str, Gpu] = field(default_factory=dict)  # cluster -> its GPU, if it differs from gpu
    #: ZeRO stage, and whether there is a pipeline -> bytes per parameter. Modes that the engine refuses
    #: are missing. {}: every stage shards the parts that ZeRO's paper names, out of state_bytes +
    #: sharded_bytes.
    state_of_mode: dict[Mode, StateBytes] = field(default_factory=dict)
    #: Number that expert-parallel sizes must divide, if blocks have different numbers of experts: their
    #: greatest common divisor. 0: `experts`.
    expert_divisor: int = 0
    #: "fp32", "fp16" or "bf16"; "" if only activation_width is known.
    precision: str = ""
    source: str = "model"  # file that the model was read from, for messages

    def __post_init__(self) -> None:
        """Raise HolmesError if a key has a bad value, or if two keys contradict each other."""
        self._check_ranges()
        self._check_choices()
        self._check_heads()
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            problem = f"{self.experts_per_token} is not 1 to {self.experts}"
            raise self._error("experts_per_token", f"{problem} (key 'experts')")
        if self.expert_layers > self.layers:
            problem = f"{self.expert_layers} is more than the {counted(self.layers, 'layer')}"
            raise self._error("expert_layers", problem)
        if bool(self.micro_batches) == bool(self.global_batch):
            raise HolmesError(
                f"{self.source}: give one of the keys 'micro_batches' and 'global_batch'"
            )

    def _check_ranges(self) -> None:
        """Raise HolmesError if a number is negative, too large, or 0 although it is required."""
        for item in fields(self):
            # Only sizes and counts. Experts per token are checked together with `experts`.
            if item.type != "int" or item.name == "experts_per_token":
                continue
            value = getattr(self, item.name)
            # A key with default 0 may be 0: "none", or a value that follows from other keys (see _key).
            is_optional = item.default == 0
            least = 0 if is_optional else 1
            if not least <= value < _MOST_ELEMENTS:
                raise self._error(item.name, f"{value} is not {least} or more")
        if self.layers > _MOST_LAYERS:
            raise self._error("layers", f"{self.layers} is more than {_MOST_LAYERS}")
        for name in ("state_bytes", "sharded_bytes"):
            value = getattr(self, name)
            if not 0 <= value < _MOST_BYTES_PER_PARAMETER:
                raise self._error(name, f"{value} is not a number of bytes, 0 or more")

    def _check_choices(self) -> None:
        """Raise HolmesError if the recomputation or the kind of positions is unknown."""
        for name, choices in (("recompute", RECOMPUTE), ("positions", POSITIONS)):
            value = getattr(self, name)
            if value not in choices:
                raise self._error(name, f"{value!r} is not one of {', '.join(choices)}")

    def _check_heads(self) -> None:
        """Raise HolmesError if hidden size, heads and key-value heads (key 'groups') do not fit together.

        The hidden size has to be a multiple of the heads, unless key 'head_size' gives the width of a head.
        The heads have to be a multiple of the key-value heads: equally many heads share each of these.
        """
        if self.key_value_rank and self.groups not in (0, self.heads):
            raise self._error("groups", "latent attention (key_value_rank) has no shared heads")
        has_valid_head_size = bool(self.head_size) or self.hidden % self.heads == 0
        key_value_heads = self.groups or self.heads
        has_valid_groups = self.heads % key_value_heads == 0
        if not has_valid_head_size or not has_valid_groups:
            problem = f"{self.heads} heads must divide hidden {self.hidden}"
            raise self._error("heads", f"{problem}, and key 'groups' the heads")

    def _error(self, key: str, problem: str) -> HolmesError:
        """Create an error about a key of the model file."""
        return HolmesError(f"{self.source}: key '{key}': {problem}")

    def gpu_of(self, cluster: str) -> Gpu:
        """Return the GPU of a cluster's nodes."""
        return self.gpus.get(cluster, self.gpu)

    def micro_batches_of(self, data: int) -> int:
        """Return the number of micro-batches that each of `data` data-parallel ranks runs per step.

        Raises:
            HolmesError: The global batch is not divisible by micro-batch size x `data`.
        """
        if self.micro_batches:
            return self.micro_batches
        sequences = self.micro_batch * data  # of all ranks in a micro-batch
        if self.global_batch % sequences == 0:
            return self.global_batch // sequences
        below = self.global_batch // sequences * sequences
        above = below + sequences
        divisible = f"{below} or {above} is" if below else f"{above} is"
        product = f"micro_batch {self.micro_batch} x data {data}"
        problem = f"{self.global_batch} is not divisible by {product}; {divisible}"
        raise self._error("global_batch", problem)

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the whole model, a tied weight counted once."""
        embedding, *blocks, output = self.costs()
        tied = self._vocabulary_of(tensor=1) * self.hidden if self.tied else 0
        return round(
            embedding.parameters
            + sum(block.parameters for block in blocks)
            + output.parameters
            - tied
        )

    def costs(self, tensor: int = 1, context: int = 1, expert: int = 1) -> tuple[Layer, ...]:
        """Return the costs of the embedding, every block and the output layer on a rank.

        Args:
            tensor: Tensor-parallel size.
            context: Context-parallel size.
            expert: Expert-parallel size.
        """
        embedding = self._embedding(tensor, context)
        block = self._block(tensor, context, expert)
        output = self._output(tensor, context)
        return (embedding, *[block] * self.layers, output)

    def _vocabulary_of(self, tensor: int) -> int:
        """Return the rows of the embedding, on all tensor-parallel ranks together.

        Example: 50257 tokens with a multiple of 128 become 50304 rows on a single rank, 50688 on four.
        """
        if not self.vocabulary_tokens or not self.vocabulary_multiple:
            return self.vocabulary
        multiple = self.vocabulary_multiple * tensor
        return -(-self.vocabulary_tokens // multiple) * multiple  # rounded up

    def _tokens(self, context: int) -> float:
        """Return the tokens of a micro-batch that a rank processes, with context parallelism."""
        return self.micro_batch * self.sequence / context

    def _stage_activation_bytes(self, tensor: int, context: int) -> float:
        """Return the bytes of a micro-batch's activations that a rank sends to the next stage."""
        elements = self._tokens(context) * self.hidden
        parts = tensor if self.sequence_parallel else 1
        return elements * self.activation_width / parts

    @property
    def _ffn(self) -> int:
        """Width of the MLP's hidden layer: 4 times the hidden size by default."""
        return self.ffn or 4 * self.hidden

    @property
    def _mlp_matrices(self) -> int:
        """Weight matrices of an MLP: a gated one has another matrix for the gate."""
        return 3 if self.gated else 2

    @property
    def _norm_parameters(self) -> tuple[int, ...]:
        """Parameters of the tensors of a norm: its weight, and its bias if there are biases."""
        return (self.hidden, self.hidden) if self.bias else (self.hidden,)

    def _block(self, tensor: int, context: int, expert: int) -> Layer:
        """Return the costs of a transformer block on a rank, for a micro-batch.

        Args:
            tensor: Tensor-parallel size.
            context: Context-parallel size.
            expert: Expert-parallel size.
        """
        tokens = self._tokens(context)
        hidden_bytes = tokens * self.hidden * self.activation_width
        widths = self._block_widths()
        flops = self._block_flops(widths, tokens, tensor)
        traffic = self._block_traffic(widths, tokens, tensor, context, expert)

        # A split backward pass can delay the weight gradients. They take as many FLOPs as the forward pass
        # without the attention scores, because scores have no weights. With experts or recomputation, no
        # FLOPs are counted that can be delayed.
        weight_flops = 0.0
        if self.recompute == "none" and not self.experts:
            weight_flops = flops.forward - flops.scores

        # _kept_per_element counts bytes as for elements of 2 bytes (16 bits).
        kept_bytes = hidden_bytes / 2 * self._kept_per_element(widths, tensor)
        return Layer(
            kind="block",
            tensors=self._block_tensors(widths, tensor),
            forward_flops=flops.forward,
            backward_flops=2 * flops.forward + flops.recomputed,
            activation_bytes=self._stage_activation_bytes(tensor, context),
            kept_bytes=kept_bytes,
            tensor_bytes=traffic.tensor,
            context_bytes=traffic.context,
            expert_bytes=traffic.expert,
            expert_parameters=self._expert_parameters(widths, tensor, expert),
            weight_flops=weight_flops,
        )

    def _block_widths(self) -> _BlockWidths:
        """Return the widths of a block's matrices, with defaults in place of optional sizes.

        Every token of a block without experts passes through the dense MLP (width ffn). In a block
        with experts, it passes through the shared expert (width shared_ffn, 0: none) instead, and
        through the experts that it is routed to.

        If only some blocks have experts, `dense_mlp` and `token_mlp` of the result are means over
        all blocks. For example, if half of the blocks have experts and none is shared, `dense_mlp`
        is half of ffn.
        """
        head_size = self.head_size or self.hidden // self.heads
        # Grouped-query attention has fewer key-value heads than heads.
        key_value_heads = self.groups or self.heads
        expert_share = 0.0  # of the blocks
        active_experts = 0  # of a token
        if self.experts:
            expert_share = (self.expert_layers or self.layers) / self.layers
            active_experts = self.experts_per_token
        dense_mlp = (1 - expert_share) * self._ffn + expert_share * self.shared_ffn
        expert_mlp = self.expert_ffn or self._ffn
        query: float = self.heads * head_size
        key_value: float = key_value_heads * head_size
        if self.key_value_rank:
            # In latent attention, query and key have the same width, value and output have another. The
            # mean of both widths stands for all four here. FLOPs and kept bytes stay the same, because
            # they are linear in the widths, and half of them belong to each width: the product
            # query x key has the first, the product scores x value has the second.
            query_key_width = self.heads * (head_size + self.rotary_size)
            value_width = self.heads * self._value_size
            query = (query_key_width + value_width) / 2
            key_value = query
        return _BlockWidths(
            query=query,
            key_value=key_value,
            dense_mlp=dense_mlp,
            expert_mlp=expert_mlp,
            token_mlp=dense_mlp + expert_share * active_experts * expert_mlp,
            expert_share=expert_share,
            active_experts=active_experts,
        )

    def _linear_tensors(self, inputs: float, outputs: float, tensor: int) -> tuple[float, ...]:
        """Return the numbers of elements of a linear layer's weight and bias on a tensor rank."""
        weight = inputs * outputs / tensor
        if not self.bias:
            return (weight,)
        return (weight, outputs / tensor)

    def _mlp_tensors(self, width: float, tensor: int) -> tuple[float, ...]:
        """Return the number of elements of each parameter of an MLP on a tensor-parallel rank."""
        if not width:
            return ()
        # A gated MLP has its two input matrices side by side in a single tensor.
        input_width = (self._mlp_matrices - 1) * width
        return (
            *self._linear_tensors(self.hidden, input_width, tensor),
            *self._linear_tensors(width, self.hidden, tensor),
        )

    def _block_tensors(self, widths: _BlockWidths, tensor: int) -> tuple[float, ...]:
        """Return the number of elements of each parameter of a block on a rank, without routed experts.

        The parameters are in the order of the forward pass. They include the router (it assigns tokens
        to experts) and the shared expert. _expert_parameters() counts the routed experts.

        All blocks of a model have the same numbers. If only some blocks have experts, the numbers of
        the router and of the dense MLP are means over all blocks, and need not be whole: a router of
        1000 elements in every third block counts as 333.3 in each.

        Args:
            widths: Widths of the block's matrices.
            tensor: Tensor-parallel size.
        """
        h = self.hidden
        router: tuple[float, ...] = ()
        if self.experts:
            router = (
                h * self.experts * widths.expert_share,
            )  # only blocks with experts have a router
        return (
            *self._norm_parameters,
            *self._attention_tensors(widths, tensor),
            *self._norm_parameters,
            *router,
            *self._mlp_tensors(widths.dense_mlp, tensor),
        )

    @property
    def _value_size(self) -> int:
        """Width of a head's value."""
        return self.value_size or self.head_size or self.hidden // self.heads

    def _attention_tensors(self, widths: _BlockWidths, tensor: int) -> tuple[float, ...]:
        """Return the number of elements of each parameter of attention on a tensor-parallel rank.

        Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) has two steps, both without bias:

        1. Matrices compress the input of a block to two latent vectors: the first for the query, the
           second for keys and values. A norm follows. Each tensor-parallel rank has these matrices whole.
        2. Matrices compute query, keys and values from the latent vectors. They are divided among
           the tensor-parallel ranks by heads, like the matrix of the output.

        Without query_rank, the query is computed from the input itself.
        """
        h = self.hidden
        if not self.key_value_rank:
            return (
                # The first matrix computes query, keys and values, the second the output.
                *self._linear_tensors(h, widths.query + 2 * widths.key_value, tensor),
                *self._linear_tensors(widths.query, h, tensor),
            )
        head_size = self.head_size or h // self.heads
        query_width = self.heads * (head_size + self.rotary_size)
        key_value_width = self.heads * (head_size + self._value_size)
        query_tensors: tuple[float, ...] = (h * query_width / tensor,)
        if self.query_rank:
            query_tensors = (
                h * self.query_rank,  # step 1
                self.query_rank,  # norm
                self.query_rank * query_width / tensor,
            )
        return (
            *query_tensors,
            # Step 1, and the part of the keys for positions (rotary). All heads share it.
            h * (self.key_value_rank + self.rotary_size),
            self.key_value_rank,  # norm
            self.key_value_rank * key_value_width / tensor,
            self.heads * self._value_size * h / tensor,  # the matrix of the output
        )

    def _expert_parameters(self, widths: _BlockWidths, tensor: int, expert: int) -> float:
        """Return the number of parameters of a block's routed experts on a rank."""
        experts_on_rank = widths.expert_share * self.experts / expert
        return experts_on_rank * sum(self._mlp_tensors(widths.expert_mlp, tensor))

    def _block_flops(self, widths: _BlockWidths, tokens: float, tensor: int) -> _BlockFlops:
        """Return the FLOPs of a block on a rank, for a micro-batch.

        Args:
            widths: Widths of the block's matrices.
            tokens: Tokens of a micro-batch on the rank.
            tensor: Tensor-parallel size; it divides all FLOPs.
        """
        attention_parameters = 2 * self.hidden * (widths.query + widths.key_value)
        if self.key_value_rank:
            attention_parameters = sum(self._attention_tensors(widths, tensor=1))
        mlp_parameters = self._mlp_matrices * self.hidden * widths.token_mlp

        # Each parameter takes a multiplication and an addition per token.
        matrix_flops = 2 * tokens * (attention_parameters + mlp_parameters)
        # Two matrix products over the sequence: scores, and scores times values.
        scores_flops = 4 * tokens * self.sequence * widths.query

        # Up to here the FLOPs are those of all tensor-parallel ranks together.
        forward_flops = (matrix_flops + scores_flops) / tensor
        recomputed_flops = 0.0
        if self.recompute == "selective":
            recomputed_flops = scores_flops / tensor
        elif self.recompute == "full":
            recomputed_flops = forward_flops
        if self.flash:
            # The backward pass computes the scores again, not the product (arXiv 2205.14135, algorithm 4).
            recomputed_flops += scores_flops / 2 / tensor
        return _BlockFlops(
            forward=forward_flops, scores=scores_flops / tensor, recomputed=recomputed_flops
        )

    def _kept_per_element(self, widths: _BlockWidths, tensor: int) -> float:
        """Return the bytes of activations that a block keeps for its backward pass, per input element.

        Activations are assumed to have 16 bits. The terms are those of Korthikanti et al. 2022 (arXiv
        2205.05198), equations 2 and 4 and table 2. A block's input has s b h elements: s tokens in a
        sequence, b sequences in a micro-batch and the hidden size h.

        Args:
            widths: Widths of the block's matrices.
            tensor: Tensor-parallel size.
        """
        h = self.hidden
        # Norms and dropout are divided among the tensor-parallel ranks only with sequence parallelism.
        norm_parts = tensor if self.sequence_parallel else 1
        if self.recompute == "full":
            return 2.0 / norm_parts  # the input of the block, 2 bytes an element

        # 2 bytes each of query and attention output (width `query`), and of keys and values.
        attention_bytes = 4 * (widths.query + widths.key_value) / h
        # Without gate: 2 bytes each for the input and the output of GeLU. SwiGLU has another input.
        mlp_bytes = (6 if self.gated else 4) * widths.token_mlp / h

        # Each further expert of a token has a copy of the MLP's input (2 bytes) and a dropout mask
        # (1 byte). A mean of all blocks: only the part `expert_share` of them has experts.
        expert_bytes = 3 * widths.expert_share * max(0, widths.active_experts - 1)

        # 2 bytes each of the inputs of two norms, of attention and of the MLP; 1 byte for each of two
        # dropout masks.
        norm_and_dropout_bytes = 10
        kept = (
            norm_and_dropout_bytes / norm_parts
            + (attention_bytes + mlp_bytes + expert_bytes) / tensor
        )
        if self.recompute == "selective":
            return kept
        scores_bytes = 0.0
        if not self.flash:
            # Softmax's output and dropout's output and mask: 2 + 2 + 1 bytes an attention score.
            scores_bytes = 5 * self.heads * self.sequence / h
        return kept + scores_bytes / tensor

    def _block_traffic(
        self, widths: _BlockWidths, tokens: float, tensor: int, context: int, expert: int
    ) -> _BlockTraffic:
        """Return the bytes that a rank exchanges with others for a block and a micro-batch.

        A rank belongs to a tensor-parallel, a context-parallel and an expert-parallel group. The
        bytes are counted for each of the three, and for the forward and backward pass together.

        Args:
            widths: Widths of the block's matrices.
            tokens: Tokens of a micro-batch on the rank.
            tensor: Tensor-parallel size.
            context: Context-parallel size.
            expert: Expert-parallel size.
        """
        hidden_bytes = tokens * self.hidden * self.activation_width
        # Forward and backward. "full" recomputation runs the forward pass again, with its
        # communication.
        passes = 3 if self.recompute == "full" else 2

        # A tensor-parallel block has two all-reduces in each pass (Shoeybi et al. 2019, arXiv
        # 1909.08053).
        all_reduce_bytes = 2 * passes * hidden_bytes

        # A block with experts has two all-to-alls in each pass: tokens to their experts, and back.
        # This is their size if each token goes to a single expert.
        all_to_all_bytes = 2 * passes * hidden_bytes
        context_bytes = 0.0
        if context > 1:
            # Keys, values and the gradients of both go around the ring. Recomputation, also of attention
            # alone (selective), sends keys and values once more.
            ring_tensors = 4 if self.recompute == "none" else 6
            context_bytes = (
                ring_tensors * tokens * widths.key_value * self.activation_width / tensor
            )

        # Mean of all blocks: only the part `expert_share` of them has experts. An all-to-all sends
        # each token to `active_experts` experts.
        routed_bytes = all_to_all_bytes * widths.expert_share * widths.active_experts
        return _BlockTraffic(
            tensor=all_reduce_bytes if tensor > 1 else 0.0,
            context=context_bytes,
            # 1 / expert stays on the rank. Tensor-parallel ranks send a part of the tokens each.
            expert=routed_bytes * (expert - 1) / expert / tensor,
        )

    def _embedding(self, tensor: int, context: int) -> Layer:
        """Return the FLOPs, bytes and parameters of the embedding on a rank, for a micro-batch.

        The result is sent on if a stage ends after the embedding (`activation_bytes`). Until the
        backward pass, the rank keeps only the mask of the dropout (`kept_bytes`).

        Args:
            tensor: Tensor-parallel size.
            context: Context-parallel size.
        """
        elements = self._tokens(context) * self.hidden  # context parallel ranks share the tokens
        position_tensors: tuple[int, ...] = ()
        if self.positions == "learned":
            position_tensors = ((self.max_positions or self.sequence) * self.hidden,)
        dropout_mask_bytes = elements / (tensor if self.sequence_parallel else 1)  # 1 byte each
        return Layer(
            kind="embedding",
            tensors=(self._vocabulary_of(tensor) * self.hidden / tensor, *position_tensors),
            forward_flops=elements,  # a lookup: 1 operation an element
            backward_flops=elements,
            activation_bytes=self._stage_activation_bytes(tensor, context),
            kept_bytes=dropout_mask_bytes,
        )

    def _output(self, tensor: int, context: int) -> Layer:
        """Return the FLOPs, bytes and parameters of the output layer on a rank, for a micro-batch.

        The layer contains the final norm, the logits and the loss.

        Args:
            tensor: Tensor-parallel size.
            context: Context-parallel size.
        """
        tokens = self._tokens(context)
        vocabulary = self._vocabulary_of(tensor)
        logits = tokens * vocabulary / tensor
        input_bytes = 2 * tokens * self.hidden * self.activation_width  # inputs of norm and matrix
        logits_bytes = 4 * logits  # in 32 bits
        forward_flops = 2 * self.hidden * logits
        return Layer(
            kind="output",
            tensors=(*self._norm_parameters, vocabulary * self.hidden / tensor),
            forward_flops=forward_flops,
            backward_flops=2 * forward_flops,
            activation_bytes=0.0,  # no stage follows
            kept_bytes=input_bytes + logits_bytes,  # until the backward pass
            # The backward pass computes two gradients with as many FLOPs each: of the weight, and
            # of the input. Only the second is needed by the stage before.
            weight_flops=forward_flops,
        )

    def layers_of(self, sizes: Sizes) -> tuple[Layer, ...]:
        """Return the costs of all layers on a rank of a job with these parallel sizes.

        With a tied embedding, a pipeline with a single stage has a single copy of the weight. A longer
        pipeline has a second copy in the output layer, on its last stage.
        """
        layers = self.costs(sizes.tensor, sizes.context, sizes.expert if self.experts else 1)
        if not self.tied or sizes.pipeline > 1:
            return layers
        output = layers[-1]
        return (*layers[:-1], replace(output, tensors=output.tensors[:-1]))

    def tied_bytes(self, sizes: Sizes) -> float:
        """Return the bytes of a tied embedding's gradient that the first and last stage all-reduce."""
        if not self.tied or sizes.pipeline == 1:
            return 0.0
        vocabulary = self._vocabulary_of(sizes.tensor)
        return vocabulary * self.hidden / sizes.tensor * self.gradient_width

    def copies(self, sizes: Sizes) -> int:
        """Return how many tensor-parallel ranks of a stage send the same activation to the next stage."""
        return 1 if self.sequence_parallel else sizes.tensor

    def workload(self, sizes: Sizes) -> Workload:
        """Return the work of a rank on an average pipeline stage, on the slowest GPU.

        Args:
            sizes: Parallel sizes, with the data size.
        """
        layers = self.costs(sizes.tensor, sizes.context, sizes.expert if self.experts else 1)

        def stage_mean(name: str) -> float:
            """Return the mean, over all pipeline stages, of a field of the layers."""
            total: float = sum(getattr(layer, name) for layer in layers)
            return total / sizes.pipeline

        slowest_flops = min(gpu.flops for gpu in (self.gpu, *self.gpus.values()))
        return Workload(
            forward_s=stage_mean("forward_flops") / slowest_flops,
            backward_s=stage_mean("backward_flops") / slowest_flops,
            micro_batches=self.micro_batches_of(sizes.data),
            gradient_bytes=stage_mean("parameters") * self.gradient_width,
            activation_bytes=layers[0].activation_bytes,  # equal for the embedding and all blocks
            tensor_bytes=stage_mean("tensor_bytes"),
            context_bytes=stage_mean("context_bytes"),
            expert_bytes=stage_mean("expert_bytes"),
            copies=self.copies(sizes),  # tensor-parallel ranks that send the same activation
            activation_width=self.activation_width,
        )


#: Version of the format of model files.
VERSION = 1


def on_clusters(model: Model, spec: SiteSpec) -> Model:
    """Return a copy of `model` with its table of GPUs (`gpus`) filled in for each cluster in cluster.toml.

    Every number of a GPU comes from the first source that has it: the numbers in cluster.toml,
    [gpu.cluster.NAME] of the model file, the GPU's product name in cluster.toml, [gpu] of the model file.

    `flops` should be the FLOP/s of kernels. cluster.toml may instead give the FLOP/s of whole training
    steps (gpu_model_flops), which are lower, as a step also waits. Then `flops` has this lower number
    at first, and with_kernel_flops() of plan/reached.py replaces it later.
    """
    gpus = {}
    for cluster in spec.clusters:
        sources = (
            cluster.accelerator,
            model.gpus.get(cluster.name),
            accelerator_of(cluster.gpu),
            model.gpu,
        )
        numbers: dict[str, Any] = {}
        for name in ("flops", "memory_bytes", "link_bps"):
            candidates = [getattr(source, name, 0.0) for source in sources]
            if name == "flops":  # the only number that cluster.toml may give in another way
                candidates[0] = cluster.accelerator.any_flops
            numbers[name] = next(filter(None, candidates), 0.0)  # 0: the source lacks it
        gpus[cluster.name] = Gpu(**numbers)
    return replace(model, gpus=gpus)


def load_model(path: str | Path) -> Model:
    """Read and validate a model file (TOML, such as those of examples/models/).

    Raises:
        HolmesError: The file cannot be read, or a key is missing, unknown or has a bad value.
    """
    top = load_toml(path, "name a model's TOML, such as those of examples/models/")
    top.version(VERSION)
    training = top.table("training")
    gpu = top.table("gpu", default={})
    values: dict[str, Any] = {}

    # A field of Model that _key() made is a key of the file. It has the type of its default value, and an
    # int if it is required.
    for item in fields(Model):
        if not item.metadata:
            continue  # not a key of the file
        table = training if item.metadata["training"] else top
        if item.default is MISSING:
            values[item.name] = table.take(item.name, int)
        else:
            values[item.name] = table.take(item.name, type(item.default), item.default)
    clusters = gpu.table("cluster", default={})
    default_gpu = _take_gpu(gpu, Gpu())
    gpus = {name: _take_gpu(clusters.table(name), default_gpu) for name in list(clusters.values)}
    for table in (top, training):
        table.done()  # raises HolmesError for a key that nothing has read, such as a misspelt one
    return Model(**values, gpu=default_gpu, gpus=gpus, source=str(path))


def _take_gpu(table: Table, default: Gpu) -> Gpu:
    """Read a GPU from a table of the model file; numbers that are missing come from `default`."""
    flops = table.take("flops", float, default.flops)
    memory_bytes = table.take("memory_bytes", float, default.memory_bytes)
    table.done()
    try:
        return Gpu(flops=flops, memory_bytes=memory_bytes)
    except HolmesError as error:
        raise HolmesError(f"{table.source}: key '{table.path}': {error}") from None


@dataclass(frozen=True)
class Memory:
    """Memory of a rank at its fullest, in bytes, by purpose."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float  # buffers that exist for a moment, such as those of recomputation

    @property
    def terms(self) -> dict[str, float]:
        """Return the memory by purpose: name -> bytes."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


def precision_of(model: Model) -> str:
    """Return the number format in which the GPUs can train the model: "fp32", "fp16" or "bf16".

    It is the model's own precision. If only the width of a number is known, 32 bits mean "fp32" and 16
    bits mean "bf16". There is one exception: "fp16" replaces "bf16" if a GPU cannot compute in bfloat16.
    """
    gpus = model.gpus.values() or (model.gpu,)
    precision_by_width = "fp32" if model.activation_width == _FP32_BYTES else "bf16"
    precision = model.precision or precision_by_width
    if precision == "bf16" and not all(gpu.has_bfloat16 for gpu in gpus):
        return "fp16"
    return precision


def accepts(model: Model, mode: Mode) -> bool:
    """Return whether the training engine, such as DeepSpeed, accepts a ZeRO stage for this model.

    The model's `state_of_mode` has an entry for each mode that its engine accepts. If the table is empty,
    nothing is known about the engine, and every mode is accepted.

    Args:
        model: The model, with the table.
        mode: ZeRO stage, and whether there is a pipeline.
    """
    return not model.state_of_mode or mode in model.state_of_mode


def state_of(model: Model, mode: Mode) -> StateBytes:
    """Return the bytes per parameter of weights, gradients and optimizer, and which of them are sharded.

    If the engine gave no numbers for the mode, the parts are those of ZeRO's paper. They add up to the
    model's state_bytes + sharded_bytes.
    """
    if mode in model.state_of_mode:
        return model.state_of_mode[mode]
    total = model.state_bytes + model.sharded_bytes
    weights = min(float(model.activation_width), total)
    gradients = min(float(model.gradient_width), total - weights)
    return StateBytes(
        weights=weights,
        gradients=gradients,
        optimizer=total - weights - gradients,
        sharded=sharded_by(mode.zero),
    )


def state_bytes(model: Model, layer: Layer, shards: int, expert_shards: int) -> float:
    """Return the bytes of a layer's weights, gradients and optimizer state on a rank.

    Args:
        model: Model with the bytes per parameter that every rank has, and those that ZeRO shards.
        layer: The layer.
        shards: Number of ranks among which the sharded bytes of dense parameters are divided.
        expert_shards: The same for parameters of experts.
    """
    dense_parameters = layer.parameters - layer.expert_parameters
    dense_bytes = model.state_bytes + model.sharded_bytes / shards  # per parameter
    expert_bytes = model.state_bytes + model.sharded_bytes / expert_shards  # per parameter
    return dense_parameters * dense_bytes + layer.expert_parameters * expert_bytes


def in_flight(stage: int, pipeline: int, virtual: int, micro_batches: int) -> float:
    """Return the largest number of micro-batches whose activations a stage holds at the same time.

    This is min(p - s, m) under 1F1B, for stage s of p and m micro-batches. With v > 1 chunks per stage it is
    min(m, (2 (p - s - 1) + (v - 1) p + 1) / v), the warm-up depth of Megatron's interleaved schedule
    (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

    Args:
        stage: Number of the stage, from 0.
        pipeline: Number of stages.
        virtual: Chunks of layers per stage.
        micro_batches: Micro-batches per step.
    """
    stages_after = pipeline - stage - 1
    if virtual == 1:
        return min(stages_after + 1, micro_batches)
    chunks = 2 * stages_after + (virtual - 1) * pipeline + 1  # chunk-sized micro-batches in flight
    return min(micro_batches, chunks / virtual)


def working_bytes(model: Model, tensor: int = 1, context: int = 1, expert: int = 1) -> float:
    """Return the bytes of activations that a block holds only while it is recomputed.

    Args:
        model: The model; without recomputation the result is 0.
        tensor: Tensor-parallel size.
        context: Context-parallel size.
        expert: Expert-parallel size.
    """
    if model.recompute == "none":
        return 0.0

    def block_kept_bytes(recompute: str) -> float:
        """Return the activations that a block keeps, in bytes; costs() has a block at index 1."""
        return replace(model, recompute=recompute).costs(tensor, context, expert)[1].kept_bytes

    return block_kept_bytes("none") - block_kept_bytes(model.recompute)


def stage_memory(
    model: Model,
    layers: Sequence[Layer],
    mode: Mode = Mode(zero=0, has_pipeline=False),
    shards: int = 1,
    expert_shards: int = 0,
    in_flight: float = 1.0,
    working: float = 0.0,
) -> Memory:
    """Compute the memory that a rank of a pipeline stage needs at its fullest moment, in bytes.

    Args:
        model: Model with the bytes per parameter.
        layers: Layers of the stage, out of model.costs().
        mode: ZeRO stage, and whether there is a pipeline.
        shards: Number of ranks that dense parameters are sharded over.
        expert_shards: The same for parameters of experts; 0: as many as `shards`.
        in_flight: Micro-batches whose activations the stage holds at the same time.
        working: Bytes of buffers that exist for a moment.
    """
    expert_parameters = sum(layer.expert_parameters for layer in layers)
    dense_parameters = sum(layer.parameters for layer in layers) - expert_parameters
    state = state_of(model, mode)
    parameters = dense_parameters + expert_parameters
    parameters_of_shard = dense_parameters / shards + expert_parameters / (expert_shards or shards)

    def part_bytes(part: str) -> float:
        """Return the bytes of a part of the state on the rank, or of the rank's shard of it."""
        held_parameters = parameters_of_shard if part in state.sharded else parameters
        return state.bytes_of(part) * held_parameters

    return Memory(
        weights=part_bytes("weights"),
        gradients=part_bytes("gradients"),
        optimizer=part_bytes("optimizer"),
        activations=in_flight * sum(layer.kept_bytes for layer in layers),
        working=working,
    )
