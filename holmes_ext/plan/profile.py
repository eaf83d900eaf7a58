"""The file profile.json: times that a job measured on its stages. They give the costs of any partition.

A layer takes the measured time on its stage, as the mean of all layers of its size. On other stages, the
time is scaled by how much faster the stage computed its blocks. So the speeds of different GPUs need not
be given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from holmes_ext.checks import Each, InRange, Satisfies, check_fields
from holmes_ext.cluster.site import Site
from holmes_ext.document import digest_of, load_json, with_digest
from holmes_ext.errors import HolmesError
from holmes_ext.files import save
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.stages import StageCosts
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.workload import Workload
from holmes_ext.words import counted

VERSION = 1
#: Largest relative difference between the gradients of a model's layer and those of the profile (because of
#: biases, or padding of the vocabulary).
_LAYER_BYTES_TOLERANCE = 0.05
#: Index of a pass in a pair of numbers: (seconds of the forward pass, seconds of the backward pass).
_PASSES = _FORWARD, _BACKWARD = 0, 1


_Amount = Annotated[float, InRange(0, 1e30)]  # seconds or bytes
_Amounts = Annotated[
    tuple[float, ...], Each(InRange(0, 1e30), "a list of finite numbers, 0 or more")
]
#: Numbers for (forward, backward).
_Pair = Annotated[_Amounts, Satisfies(lambda values: len(values) == len(_PASSES), "two numbers")]


@dataclass(frozen=True)
class StageTimes:
    """Times that the slowest rank of a pipeline stage measured, in seconds."""

    clusters: tuple[str, ...]
    nodes: tuple[str, ...]
    blocks: tuple[int, ...]  # numbers of the stage's blocks; the model's first block is 0
    forward_s: _Amounts  # of a micro-batch, for each of `blocks`
    backward_s: _Amounts
    before_s: _Pair  # of the layers before the first block: (forward, backward) of a micro-batch
    after_s: _Pair  # of the layers after the model's last block
    # Of an all-reduce of the stage's gradients, while nothing else runs:
    reduction_s_per_byte: _Amount
    reduction_latency_s: _Amount
    stage_link_s: _Amount  # of an activation to the next stage, while nothing else runs
    # Of a whole step, with the time that the rank waits for others:
    send_s: _Amount = 0.0
    receive_s: _Amount = 0.0
    reduce_s: _Amount = 0.0
    tied_s: _Amount = 0.0
    optimizer_s: _Amount = 0.0
    idle_s: _Amount = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "a stage of the profile")


@dataclass(frozen=True)
class Profile:
    """Times that a job measured with --holmes-profile."""

    framework: str
    site: dict[str, Any]  # Site.to_dict()
    sizes: Sizes
    micro_batches: Annotated[int, InRange(1, 1e30)]
    steps: Annotated[int, InRange(1, 1e30)]
    #: Gradients of a rank: layers before the first block, each block, layers after the last block.
    gradient_bytes: _Amounts
    activation_bytes: _Amount  # sent to the next stage for a micro-batch
    step_s: _Amount
    stages: tuple[StageTimes, ...]
    source: str = "the profile"

    def __post_init__(self) -> None:
        """Raise HolmesError if a field has a bad value, or if the stages do not have each block once."""
        check_fields(self, "the profile")
        if len(self.stages) != self.sizes.pipeline:
            raise HolmesError(
                f"key 'stages' has {counted(len(self.stages), 'entry')} for pipeline {self.sizes.pipeline}"
            )
        blocks = [block for stage in self.stages for block in stage.blocks]
        if sorted(blocks) != list(range(self.blocks)):
            problem = f"key 'stages': blocks {blocks} must be 0..{self.blocks - 1}, each once"
            raise HolmesError(f"{problem}; profile a job whose layers are nn.Modules")
        for index, stage in enumerate(self.stages):
            if not len(stage.forward_s) == len(stage.backward_s) == len(stage.blocks) > 0:
                needed = "forward_s and backward_s need a time for each of its blocks"
                raise HolmesError(f"key 'stages[{index}]': {needed}")
            if not _blocks_s(stage) > 0:
                raise HolmesError(
                    f"key 'stages[{index}]': its blocks took no time; the hooks saw none of them run"
                )

    @property
    def blocks(self) -> int:
        """Return the number of transformer blocks of the measured model."""
        return len(self.gradient_bytes) - 2

    @property
    def site_digest(self) -> str:
        """Return a digest of the site (clusters, nodes, networks) that the measured job ran on."""
        return Site.from_dict(self.site).digest

    @property
    def model_digest(self) -> str:
        """Return a digest of the model's shape: sizes of all gradients and of an activation."""
        return digest_of(
            [[float(size) for size in self.gradient_bytes], float(self.activation_bytes)]
        )[:16]

    def workload(self) -> Workload:
        """Return the work of a rank on an average pipeline stage.

        Bytes of tensor, context and expert groups are 0: their time is part of the measured passes.
        """
        count = len(self.stages)
        # Blocks, layers before the first block (before_s: embedding), and after the last block (after_s:
        # output). The stages that lack such layers have 0.
        forward_s = sum(
            sum(stage.forward_s) + stage.before_s[_FORWARD] + stage.after_s[_FORWARD]
            for stage in self.stages
        )
        backward_s = sum(
            sum(stage.backward_s) + stage.before_s[_BACKWARD] + stage.after_s[_BACKWARD]
            for stage in self.stages
        )
        return Workload(
            forward_s=forward_s / count,
            backward_s=backward_s / count,
            micro_batches=self.micro_batches,
            gradient_bytes=sum(self.gradient_bytes) / count,
            activation_bytes=self.activation_bytes,
            tensor_bytes=0.0,
            context_bytes=0.0,
            expert_bytes=0.0,
        )

    def to_json(self) -> str:
        """Return the measured times as the content of a profile.json."""
        content = {"version": VERSION, **asdict(self)}
        content |= {"model_digest": self.model_digest, "site_digest": self.site_digest}
        del content["source"]
        return with_digest(content)

    def save(self, path: str | Path) -> None:
        """Write profile.json, completely or not at all."""
        save(path, self.to_json(), "the profile")


def load_profile(path: str | Path) -> Profile:
    """Read and validate profile.json.

    Raises:
        HolmesError: The file cannot be read, a key has a bad value, or the file was edited.
    """
    top = load_json(path, "--holmes-profile N writes one")
    top.version(VERSION)
    stored = {name: top.take(name, str) for name in ("digest", "model_digest", "site_digest")}
    try:
        profile = top.into(Profile, site=top.table("site").values, source=str(path))
        has_same_digests = (
            profile.site_digest == stored["site_digest"]
            and profile.model_digest == stored["model_digest"]
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"not a profile of this holmes_ext ({type(error).__name__}: {error})"
        raise HolmesError(f"{path}: {problem}; measure it again") from None
    content = {key: value for key, value in top.values.items() if key != "digest"}
    if not has_same_digests or digest_of(content) != stored["digest"]:
        problem = "key 'digest' does not match: the file was edited or truncated"
        raise HolmesError(f"{path}: {problem}; measure it again with --holmes-profile N")
    return profile


def check_profile(
    profile: Profile, site: Site, sizes: Sizes | None = None, model: Model | None = None
) -> None:
    """Check that a profile was measured on the same site, with the same sizes and model.

    Raises:
        HolmesError: Something differs. The message names the way out.
    """
    name = profile.source
    measured = profile.sizes
    if profile.site_digest != site.digest:
        problem = f"key 'site_digest': measured on other clusters or rates than {site.source}"
        raise HolmesError(
            f"{name}: {problem}; measure it again on these clusters with --holmes-profile N"
        )
    if sizes is not None and sizes.complete(site.world_size) != measured:
        problem = (
            f"key 'sizes': measured with pipeline {measured.pipeline}, tensor {measured.tensor}"
        )
        raise HolmesError(f"{name}: {problem}; measure it with the sizes asked for")
    if model is None:
        return
    if model.layers != profile.blocks:
        counts = f"{counted(profile.blocks, 'layer')}, but {model.source} has {model.layers}"
        raise HolmesError(f"{name}: the profile of another model: {counts}")
    block_bytes = profile.gradient_bytes[1]  # [0] has the layers before the first block
    _, block, *_ = model.layers_of(measured)
    expected_bytes = block.parameters * model.gradient_width
    if abs(block_bytes - expected_bytes) > _LAYER_BYTES_TOLERANCE * expected_bytes:
        both = f"{block_bytes:.4g} bytes, those of {model.source} {expected_bytes:.4g}"
        raise HolmesError(f"{name}: the profile of another model: a layer's gradients are {both}")


def measured_costs(
    profile: Profile, clusters: Sequence[Sequence[str]], overlap: bool = False
) -> StageCosts:
    """Return the measured costs of every layer, for stages on given clusters.

    StageCosts has no field for the optimizer. It runs once a step, after the reduction, so its time is added
    to `latency_s`, the part of a reduction's time that does not depend on the bytes.

    Args:
        profile: The measurements.
        clusters: Names of the clusters of each stage. Several: its nodes are in different clusters.
        overlap: Whether gradients are reduced during the last backward pass.

    Raises:
        HolmesError: The profile has no stage on the same clusters.
    """
    # Measured times of a stage on the same clusters, for each stage.
    measured = [_measured_on(profile, names, stage) for stage, names in enumerate(clusters)]
    first = profile.stages[0]  # measured the layers before the first block
    last = profile.stages[-1]  # measured the layers after the last block

    def layer_times(times: StageTimes, direction: int) -> tuple[float, ...]:
        """Return the seconds of every layer on a stage: measured there, or scaled from another stage.

        Args:
            times: Times of the stage.
            direction: _FORWARD or _BACKWARD.
        """
        before_s = first.before_s[direction] * _ratio(first, times)
        after_s = last.after_s[direction] * _ratio(last, times)
        return (before_s, *_block_times(profile, times, direction), after_s)

    # Messages: an activation to the next stage, whatever layer the stage ends with.
    neighbours = zip(clusters, clusters[1:])
    links_s = [_stage_link_s(profile, source, target) for source, target in neighbours]
    layers = len(profile.gradient_bytes)
    sends_s = (*links_s, 0.0)  # the last stage sends none
    transfer_s = tuple((send_s,) * layers for send_s in sends_s)

    # A stage that comes last to the all-reduce of the embeddings, or of the norm in the optimizer, does
    # not wait for others in it. So the least of the stages' times is that of the operation itself.
    optimizer_s = min(stage.optimizer_s for stage in profile.stages)
    tied_s = min(first.tied_s, last.tied_s) if len(clusters) > 1 else 0.0

    # By stage and layer: seconds of reducing the layer's gradients.
    reduction_s = tuple(
        tuple(size * times.reduction_s_per_byte for size in profile.gradient_bytes)
        for times in measured
    )
    return StageCosts(
        forward_s=tuple(layer_times(times, _FORWARD) for times in measured),
        backward_s=tuple(layer_times(times, _BACKWARD) for times in measured),
        reduction_s=reduction_s,
        transfer_s=transfer_s,
        micro_batches=profile.micro_batches,
        latency_s=tuple(times.reduction_latency_s + optimizer_s for times in measured),
        tied_s=tied_s,
        overlap=overlap,
        places=tuple(", ".join(names) for names in clusters),
        link_load_s=tuple(links_s),
    )


def _measured_on(profile: Profile, names: Sequence[str], stage: int) -> StageTimes:
    """Return the measured times of a stage that ran on exactly the given clusters.

    If several stages did, it is that with the number `stage` if possible, else the first.

    Args:
        profile: Times of all measured stages.
        names: Names of the clusters.
        stage: Number of the stage to prefer.

    Raises:
        HolmesError: No stage was measured on these clusters.
    """
    same_stage = profile.stages[stage : stage + 1]  # empty if fewer stages were measured
    for times in (*same_stage, *profile.stages):
        if set(times.clusters) == set(names):
            return times
    measured = "; ".join(", ".join(times.clusters) for times in profile.stages)
    problem = f"no stage was measured on cluster {', '.join(names)} (stages ran on {measured})"
    raise HolmesError(f"{profile.source}: {problem}; measure this placement")


def _stage_link_s(profile: Profile, source: Sequence[str], target: Sequence[str]) -> float:
    """Return the seconds of an activation between stages on two sets of clusters.

    If no stage link between them was measured, this is the time of the slowest stage link.
    """
    wanted = {frozenset(source), frozenset(target)}  # in either direction
    all_s = []
    matching_s = []
    for sender, receiver in zip(profile.stages, profile.stages[1:]):
        all_s.append(sender.stage_link_s)
        if {frozenset(sender.clusters), frozenset(receiver.clusters)} == wanted:
            matching_s.append(sender.stage_link_s)
    return max(matching_s or all_s, default=0.0)


def _blocks_s(stage: StageTimes) -> float:
    """Return the seconds of a micro-batch in all blocks of a stage, forward and backward."""
    return sum(stage.forward_s) + sum(stage.backward_s)


def _ratio(measured: StageTimes, wanted: StageTimes) -> float:
    """Return how many times as long a block takes on stage `wanted` as on stage `measured`.

    A time from `measured`, times the result, is the time on `wanted`.
    """
    wanted_s = _blocks_s(wanted) / len(wanted.blocks)
    measured_s = _blocks_s(measured) / len(measured.blocks)
    return wanted_s / measured_s


def _block_times(profile: Profile, stage: StageTimes, direction: int) -> list[float]:
    """Return the seconds of every block of the model if it were on a given stage.

    A block takes the mean of the measured blocks of its size on this stage. If there is none, it takes the
    time on the stage that had it, scaled by the speed of both stages.

    Args:
        profile: The measurements.
        stage: The stage.
        direction: _FORWARD or _BACKWARD.
    """
    # Gradients of each block; the first and last number are those of embedding and output layer.
    sizes = profile.gradient_bytes[1:-1]
    measured_s = stage.backward_s if direction == _BACKWARD else stage.forward_s
    times_of_size: dict[float, list[float]] = {}  # of the blocks that the stage itself had
    for block, seconds in zip(stage.blocks, measured_s):
        times_of_size.setdefault(sizes[block], []).append(seconds)
    stage_of = {block: measured for measured in profile.stages for block in measured.blocks}
    result = []
    for block, size in enumerate(sizes):
        same_size_s = times_of_size.get(size, [])
        if same_size_s:
            result.append(sum(same_size_s) / len(same_size_s))
            continue
        measured = stage_of[block]  # the stage that had this block
        times_s = measured.backward_s if direction == _BACKWARD else measured.forward_s
        block_s = times_s[measured.blocks.index(block)]
        result.append(block_s * _ratio(measured, wanted=stage))
    return result
