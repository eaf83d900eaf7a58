"""profile.json: what a job's stages took, and the costs of any partition that follow.

A layer costs what was measured on the stage, the mean over its layers of that size; elsewhere it is scaled by
how much faster that stage is with what both computed. So GPUs that differ need no numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from holmes_ext.checks import Each, InRange, Satisfies, check_fields
from holmes_ext.cluster.site import Site
from holmes_ext.document import digest_of, load_json, save, with_digest
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.stages import StageCosts
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.workload import Workload

VERSION = 1
#: A model's layer may differ so much from the profile's in the bytes of its gradients (biases, padding of the
#: vocabulary).
_SAME_MODEL = 0.05


_Amount = Annotated[float, InRange(0, 1e30)]  # seconds or bytes
_Amounts = Annotated[
    tuple[float, ...], Each(InRange(0, 1e30), "a list of finite numbers, 0 or more")
]
#: Of the passes (forward, backward).
_Pair = Annotated[_Amounts, Satisfies(lambda values: len(values) == 2, "two numbers")]


@dataclass(frozen=True)
class StageTimes:
    """What the slowest rank of one pipeline stage measured, in seconds."""

    clusters: tuple[str, ...]
    nodes: tuple[str, ...]
    blocks: tuple[int, ...]  # numbers of the stage's blocks; the model's first block is 0
    forward_s: _Amounts  # of one micro-batch, for each of `blocks`
    backward_s: _Amounts
    before_s: _Pair  # of the layers before the model's first block: (forward, backward) of one micro-batch
    after_s: _Pair  # of the layers after the model's last block
    #: Of an all-reduce of the stage's gradients, while nothing else runs.
    reduction_s_per_byte: _Amount
    reduction_latency_s: _Amount
    stage_link_s: _Amount  # of an activation to the next stage, while nothing else runs
    # Of one step, with the time that the rank waits for others:
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
    """What a job measured with --holmes-profile."""

    framework: str
    site: dict[str, Any]  # Site.to_dict()
    sizes: Sizes
    micro_batches: Annotated[int, InRange(1, 1e30)]
    steps: Annotated[int, InRange(1, 1e30)]
    #: Of one rank: of the layers before the blocks, of every block, of those after.
    gradient_bytes: _Amounts
    activation_bytes: _Amount
    step_s: _Amount
    stages: tuple[StageTimes, ...]
    source: str = "the profile"

    def __post_init__(self) -> None:
        check_fields(self, "the profile")
        if len(self.stages) != self.sizes.pipeline:
            raise HolmesError(
                f"key 'stages' has {len(self.stages)} entries for pipeline {self.sizes.pipeline}"
            )
        blocks = [block for stage in self.stages for block in stage.blocks]
        if sorted(blocks) != list(range(self.blocks)):
            what = f"key 'stages': blocks {blocks} must be 0..{self.blocks - 1}, each once"
            raise HolmesError(f"{what}; profile a job whose layers are nn.Modules")
        for index, stage in enumerate(self.stages):
            if not len(stage.forward_s) == len(stage.backward_s) == len(stage.blocks) > 0:
                needed = "forward_s and backward_s need a time for each of its blocks"
                raise HolmesError(f"key 'stages[{index}]': {needed}")
            if not _busy(stage) > 0:
                raise HolmesError(
                    f"key 'stages[{index}]': its blocks took no time; the hooks saw none of them run"
                )

    @property
    def blocks(self) -> int:
        return len(self.gradient_bytes) - 2

    @property
    def site_digest(self) -> str:
        return Site.from_dict(self.site).digest

    @property
    def model_digest(self) -> str:
        """Of the model's shape: blocks, gradients, activation."""
        return digest_of(
            [[float(size) for size in self.gradient_bytes], float(self.activation_bytes)]
        )[:16]

    def workload(self) -> Workload:
        """One rank's work on the average stage: what placement compares orders with."""
        count, none = (
            len(self.stages),
            dict[str, Any](tensor_bytes=0.0, context_bytes=0.0, expert_bytes=0.0),
        )
        forward = sum(
            sum(stage.forward_s) + stage.before_s[0] + stage.after_s[0] for stage in self.stages
        )
        backward = sum(
            sum(stage.backward_s) + stage.before_s[1] + stage.after_s[1] for stage in self.stages
        )
        gradients = sum(self.gradient_bytes) / count
        return Workload(
            forward / count,
            backward / count,
            self.micro_batches,
            gradients,
            self.activation_bytes,
            **none,
        )

    def to_json(self) -> str:
        content = {"version": VERSION, **asdict(self)}
        content |= {"model_digest": self.model_digest, "site_digest": self.site_digest}
        del content["source"]
        return with_digest(content)

    def save(self, path: str | Path) -> None:
        """Write profile.json whole or not at all."""
        save(path, self.to_json(), "the profile")


def load_profile(path: str | Path) -> Profile:
    """Read and validate profile.json; HolmesError names the file and the key."""
    top = load_json(path, "--holmes-profile N writes one")
    top.version(VERSION)
    stored = {name: top.take(name, str) for name in ("digest", "model_digest", "site_digest")}
    try:
        profile = top.into(Profile, site=top.table("site").values, source=str(path))
        same = (
            profile.site_digest == stored["site_digest"]
            and profile.model_digest == stored["model_digest"]
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"not a profile of this holmes_ext ({type(error).__name__}: {error})"
        raise HolmesError(f"{path}: {what}; measure it again") from None
    content = {key: value for key, value in top.values.items() if key != "digest"}
    if not same or digest_of(content) != stored["digest"]:
        what = "key 'digest' does not match: the file was edited or truncated"
        raise HolmesError(f"{path}: {what}; measure it again with --holmes-profile N")
    return profile


def check_profile(
    profile: Profile, site: Site, sizes: Sizes | None = None, model: Model | None = None
) -> None:
    """HolmesError when the profile is of another cluster, other sizes or another model."""
    where, measured = profile.source, profile.sizes
    if profile.site_digest != site.digest:
        what = f"key 'site_digest': measured on other clusters or rates than {site.source}"
        raise HolmesError(
            f"{where}: {what}; measure it again on these clusters with --holmes-profile N"
        )
    if sizes is not None and sizes.complete(site.world_size) != measured:
        what = f"key 'sizes': measured with pipeline {measured.pipeline}, tensor {measured.tensor}"
        raise HolmesError(f"{where}: {what}; measure it with the sizes asked for")
    if model is None:
        return
    if model.layers != profile.blocks:
        counts = f"{profile.blocks} layers, but {model.source} has {model.layers}"
        raise HolmesError(f"{where}: the profile of another model: {counts}")
    expected = model.layers_of(measured)[1].parameters * model.gradient_width
    if abs(profile.gradient_bytes[1] - expected) > _SAME_MODEL * expected:
        sizes_said = (
            f"{profile.gradient_bytes[1]:.4g} bytes, those of {model.source} {expected:.4g}"
        )
        raise HolmesError(
            f"{where}: the profile of another model: a layer's gradients are {sizes_said}"
        )


def measured_costs(
    profile: Profile, clusters: Sequence[Sequence[str]], overlap: bool = False
) -> StageCosts:
    """On stages that lie on `clusters` (names for each); HolmesError: the profile has no such stage.
    latency_s holds the optimizer too: both come once a step, after the reduction."""
    measured = [_measured_on(profile, names, stage) for stage, names in enumerate(clusters)]
    first, last = profile.stages[0], profile.stages[-1]

    def row(times: StageTimes, direction: int) -> tuple[float, ...]:
        ends = (
            first.before_s[direction] * _ratio(first, times),
            last.after_s[direction] * _ratio(last, times),
        )
        return (ends[0], *_blocks(profile, times, direction), ends[1])

    # Who comes last to the embeddings' all-reduce, or to the optimizer's norm, does not wait in it: so the
    # least of the stages' times.
    optimizer = min(stage.optimizer_s for stage in profile.stages)
    stage_links = [*(_stage_link(profile, *pair) for pair in zip(clusters, clusters[1:])), 0.0]
    return StageCosts(
        forward_s=tuple(row(times, 0) for times in measured),
        backward_s=tuple(row(times, 1) for times in measured),
        reduction_s=tuple(
            tuple(size * times.reduction_s_per_byte for size in profile.gradient_bytes)
            for times in measured
        ),
        transfer_s=tuple((stage_link,) * len(profile.gradient_bytes) for stage_link in stage_links),
        micro_batches=profile.micro_batches,
        latency_s=tuple(times.reduction_latency_s + optimizer for times in measured),
        tied_s=min(first.tied_s, last.tied_s) if len(clusters) > 1 else 0.0,
        overlap=overlap,
        places=tuple(", ".join(names) for names in clusters),
        hidden=tuple(stage_links[:-1]),
    )


def _measured_on(profile: Profile, names: Sequence[str], stage: int) -> StageTimes:
    """The stage of the profile on the same clusters: the one in the same place where there is one."""
    order = [*profile.stages[stage : stage + 1], *profile.stages]
    result = next(
        (stage_times for stage_times in order if set(stage_times.clusters) == set(names)), None
    )
    if result is None:
        measured = "; ".join(", ".join(stage_times.clusters) for stage_times in profile.stages)
        what = f"no stage was measured on cluster {', '.join(names)} (stages ran on {measured})"
        raise HolmesError(f"{profile.source}: {what}; measure this placement")
    return result


def _stage_link(profile: Profile, source: Sequence[str], target: Sequence[str]) -> float:
    """Seconds of an activation between stages on these clusters; of the slowest stage link if none was
    measured."""
    pairs = list(zip(profile.stages, profile.stages[1:]))
    wanted = {frozenset(source), frozenset(target)}
    matching = [
        a.stage_link_s for a, b in pairs if {frozenset(a.clusters), frozenset(b.clusters)} == wanted
    ]
    return max(matching or [a.stage_link_s for a, _ in pairs], default=0.0)


def _busy(stage: StageTimes) -> float:
    return sum(stage.forward_s) + sum(stage.backward_s)


def _ratio(measured: StageTimes, wanted: StageTimes) -> float:
    """How many times as long as on `measured` a block takes on `wanted`."""
    return _busy(wanted) / len(wanted.blocks) / (_busy(measured) / len(measured.blocks))


def _blocks(profile: Profile, on: StageTimes, direction: int) -> list[float]:
    """Seconds of every block on stage `on`; direction 0: forward, 1: backward."""
    sizes = profile.gradient_bytes[1:-1]
    homes = {block: stage for stage in profile.stages for block in stage.blocks}
    times_of_size: dict[float, list[float]] = {}
    for block, *times in zip(on.blocks, on.forward_s, on.backward_s):
        times_of_size.setdefault(sizes[block], []).append(times[direction])
    result = []
    for block, size in enumerate(sizes):
        home = homes[block]
        home_s = home.backward_s if direction else home.forward_s
        scaled_s = home_s[home.blocks.index(block)] * _ratio(home, on)
        alike = times_of_size.get(size)
        result.append(sum(alike) / len(alike) if alike else scaled_s)
    return result
