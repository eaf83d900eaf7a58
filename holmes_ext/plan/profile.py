"""profile.json: what a job's stages took, and the costs of any partition that follow.

A layer that was measured on the stage costs there what was measured, the mean over the stage's layers of the same size;
elsewhere its time is scaled by how much faster or slower that stage is with what both computed. So GPUs that differ
need no numbers from anyone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from holmes_ext.cluster.site import Site
from holmes_ext.document import Table, load_json, save
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.stages import StageCosts
from holmes_ext.plan.cost.workload import Workload
from holmes_ext.plan.sizes import Sizes

VERSION = 1
#: A model's layer may differ so much from the profile's in the bytes of its gradients (biases, padding of the
#: vocabulary).
_SAME_MODEL = 0.05


@dataclass(frozen=True)
class StageTimes:
    """Seconds on one stage, of its slowest rank. forward_s, backward_s: of its `blocks` (numbers from 0), one
    micro-batch; before_s, after_s: (forward, backward) of what stands before the first block and after the last.
    reduction_s_per_byte, reduction_latency_s: an all-reduce of its gradients; edge_s: an activation to the next stage;
    both measured alone. The rest: of one step, waiting included."""

    clusters: tuple[str, ...]
    nodes: tuple[str, ...]
    blocks: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    before_s: tuple[float, ...]
    after_s: tuple[float, ...]
    reduction_s_per_byte: float
    reduction_latency_s: float
    edge_s: float
    send_s: float = 0.0
    receive_s: float = 0.0
    reduce_s: float = 0.0
    tied_s: float = 0.0
    optimizer_s: float = 0.0
    idle_s: float = 0.0


@dataclass(frozen=True)
class Profile:
    """gradient_bytes: of one rank, "before", every block, "after". site: cluster/site.py's dict. HolmesError names file
    and key."""

    framework: str
    site: dict[str, Any]
    sizes: Sizes
    micro_batches: int
    steps: int
    gradient_bytes: tuple[float, ...]
    activation_bytes: float
    step_s: float
    stages: tuple[StageTimes, ...]
    source: str = "the profile"

    def __post_init__(self):
        self._check("step_s", self.step_s)
        self._check("activation_bytes", self.activation_bytes)
        for index, size in enumerate(self.gradient_bytes):
            self._check(f"gradient_bytes[{index}]", size)
        if self.micro_batches < 1 or self.steps < 1:
            raise HolmesError(f"{self.source}: keys 'micro_batches' and 'steps' must be 1 or more")
        if len(self.stages) != self.sizes.pipeline:
            raise HolmesError(f"{self.source}: key 'stages' has {len(self.stages)} entries for pipeline {self.sizes.pipeline}")
        blocks = [block for stage in self.stages for block in stage.blocks]
        if sorted(blocks) != list(range(self.blocks)):
            raise HolmesError(f"{self.source}: key 'stages': blocks {blocks} are not each of 0..{self.blocks - 1} once; measure a job whose layers are modules")
        for index, stage in enumerate(self.stages):
            where = f"stages[{index}]"
            if not (len(stage.forward_s) == len(stage.backward_s) == len(stage.blocks) > 0 and len(stage.before_s) == len(stage.after_s) == 2):
                raise HolmesError(f"{self.source}: key '{where}': forward_s and backward_s need a time for each of its blocks, before_s and after_s two")
            for item in fields(stage):
                value = getattr(stage, item.name)
                if item.name.endswith(("_s", "_byte")):
                    for time_s in value if isinstance(value, tuple) else (value,):
                        self._check(f"{where}.{item.name}", time_s)
            if not sum(stage.forward_s) + sum(stage.backward_s) > 0:
                raise HolmesError(f"{self.source}: key '{where}': its blocks took no time; the hooks saw none of them run")

    def _check(self, key: str, value: float) -> None:
        if not 0 <= value < 1e30:
            raise HolmesError(f"{self.source}: key '{key}' is {value}; it must be 0 or more, and finite")

    @property
    def blocks(self) -> int:
        return len(self.gradient_bytes) - 2

    @property
    def site_digest(self) -> str:
        return Site.from_dict(self.site).digest

    @property
    def model_digest(self) -> str:
        """Of the model's shape: blocks, gradients, activation."""
        return hashlib.sha256(json.dumps([[float(size) for size in self.gradient_bytes], float(self.activation_bytes)]).encode()).hexdigest()[:16]

    def workload(self) -> Workload:
        """One rank's work on the average stage: what placement compares orders with."""
        count = len(self.stages)
        return Workload(
            forward_s=sum(sum(stage.forward_s) + stage.before_s[0] + stage.after_s[0] for stage in self.stages) / count,
            backward_s=sum(sum(stage.backward_s) + stage.before_s[1] + stage.after_s[1] for stage in self.stages) / count,
            micro_batches=self.micro_batches,
            gradient_bytes=sum(self.gradient_bytes) / count,
            activation_bytes=self.activation_bytes,
            tensor_bytes=0.0,
            context_bytes=0.0,
            expert_bytes=0.0,
        )

    def _content(self) -> dict[str, Any]:
        content = asdict(self)
        del content["source"]
        return {"version": VERSION, **content, "model_digest": self.model_digest, "site_digest": self.site_digest}

    def to_json(self) -> str:
        content = self._content()
        return json.dumps({**content, "digest": _digest(content)}, indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """Write profile.json whole or not at all."""
        save(path, self.to_json(), "the profile")


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def load_profile(path: str | Path) -> Profile:
    """Read and validate profile.json; HolmesError names the file and the key."""
    top = load_json(path, "--holmes-profile N writes one")
    top.version(VERSION)
    sizes = top.table("sizes")
    stored = {name: top.take(name, str) for name in ("digest", "model_digest", "site_digest")}
    try:
        profile = Profile(
            framework=top.take("framework", str),
            site=top.table("site").values,
            sizes=Sizes(**{name: sizes.take(name, int) for name in ("pipeline", "tensor", "context", "expert", "data")}, order=sizes.take("order", str)),
            micro_batches=top.take("micro_batches", int),
            steps=top.take("steps", int),
            gradient_bytes=_numbers(top, "gradient_bytes"),
            activation_bytes=top.take("activation_bytes", float),
            step_s=top.take("step_s", float),
            stages=tuple(_stage(table) for table in top.tables("stages")),
            source=str(path),
        )
        same = profile.site_digest == stored["site_digest"] and profile.model_digest == stored["model_digest"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise HolmesError(f"{path}: not a profile of this holmes_ext ({type(error).__name__}: {error}); measure it again") from None
    top.done()
    if not same or _digest({key: value for key, value in top.values.items() if key != "digest"}) != stored["digest"]:
        raise HolmesError(f"{path}: key 'digest' does not match: the file was edited or cut; measure it again with --holmes-profile N")
    return profile


def _stage(table: Table) -> StageTimes:
    values = {}
    for item in fields(StageTimes):
        if item.name in ("clusters", "nodes"):
            values[item.name] = table.list(item.name, str)
        elif item.name == "blocks":
            values[item.name] = table.list(item.name, int)
        else:
            values[item.name] = _numbers(table, item.name) if item.type == "tuple[float, ...]" else table.take(item.name, float)
    table.done()
    return StageTimes(**values)


def _numbers(table: Table, key: str) -> tuple[float, ...]:
    table.read.add(key)
    values = table.values.get(key)
    if not isinstance(values, list) or not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        raise HolmesError(f"{table.at(key)}: not a list of numbers")
    return tuple(map(float, values))


def check_profile(profile: Profile, site: Site, sizes: Sizes | None = None, model: Model | None = None) -> None:
    """HolmesError when the profile is of another cluster, other sizes or another model."""
    if profile.site_digest != site.digest:
        raise HolmesError(f"{profile.source}: key 'site_digest': measured on other clusters or rates than {site.source}; measure it there with --holmes-profile N")
    if sizes is not None and sizes.complete(site.world_size) != profile.sizes:
        raise HolmesError(f"{profile.source}: key 'sizes': measured with pipeline {profile.sizes.pipeline}, tensor {profile.sizes.tensor}; measure it with the sizes asked for")
    if model is None:
        return
    if model.layers != profile.blocks:
        raise HolmesError(f"{profile.source}: the profile of another model: {profile.blocks} layers, but {model.source} has {model.layers}")
    layers = model.costs(profile.sizes.tensor, profile.sizes.context, profile.sizes.expert if model.experts else 1)
    expected, measured = layers[1].parameters * model.gradient_width, profile.gradient_bytes[1]
    if abs(measured - expected) > _SAME_MODEL * expected:
        raise HolmesError(
            f"{profile.source}: the profile of another model: a layer's gradients are {measured:.4g} bytes, those of {model.source} {expected:.4g}"
        )


def measured_costs(profile: Profile, clusters: Sequence[Sequence[str]], overlap: bool = False) -> StageCosts:
    """The costs on stages that lie on `clusters` (names for each); HolmesError when the profile has no such stage.

    latency_s holds the optimizer too: both come once a step, after the reduction.
    """
    on = [_measured_on(profile, names, stage) for stage, names in enumerate(clusters)]
    edges = [max(_edge(profile, clusters[stage], clusters[stage + 1]), 0.0) if stage + 1 < len(clusters) else 0.0 for stage in range(len(clusters))]
    first, last = profile.stages[0], profile.stages[-1]
    forward, backward = (
        tuple(
            (first.before_s[way] * _ratio(first, one), *_blocks(profile, one, way), last.after_s[way] * _ratio(last, one)) for one in on
        )
        for way in (0, 1)
    )
    # Who comes last to the embeddings' all-reduce, or to the optimizer's norm, does not wait in it: so the least of the
    # stages' times.
    tied = min(first.tied_s, last.tied_s) if len(clusters) > 1 else 0.0
    optimizer = min(stage.optimizer_s for stage in profile.stages)
    return StageCosts(
        forward_s=forward,
        backward_s=backward,
        reduction_s=tuple(tuple(size * one.reduction_s_per_byte for size in profile.gradient_bytes) for one in on),
        transfer_s=tuple((edge,) * len(profile.gradient_bytes) for edge in edges),
        micro_batches=profile.micro_batches,
        latency_s=tuple(one.reduction_latency_s + optimizer for one in on),
        tied_s=tied,
        overlap=overlap,
        places=tuple(", ".join(names) for names in clusters),
    )


def _measured_on(profile: Profile, names: Sequence[str], stage: int) -> StageTimes:
    """The stage of the profile on the same clusters: the one in the same place where there is one."""
    order = [*profile.stages[stage : stage + 1], *profile.stages]
    found = next((one for one in order if set(one.clusters) == set(names)), None)
    if found is None:
        measured = "; ".join(", ".join(one.clusters) for one in profile.stages)
        raise HolmesError(f"{profile.source}: no stage was measured on cluster {', '.join(names)} (stages lay on {measured}); measure this placement")
    return found


def _edge(profile: Profile, here: Sequence[str], there: Sequence[str]) -> float:
    pairs = list(zip(profile.stages, profile.stages[1:]))
    same = [a.edge_s for a, b in pairs if {frozenset(a.clusters), frozenset(b.clusters)} == {frozenset(here), frozenset(there)}]
    return max(same, default=max((a.edge_s for a, _ in pairs), default=0.0))


def _pace(stage: StageTimes) -> float:
    return (sum(stage.forward_s) + sum(stage.backward_s)) / len(stage.blocks)


def _ratio(measured: StageTimes, wanted: StageTimes) -> float:
    """How many times as long as on `measured` a block takes on `wanted`."""
    return _pace(wanted) / _pace(measured)


def _blocks(profile: Profile, on: StageTimes, way: int) -> list[float]:
    """Seconds of every block on stage `on`; way 0: forward, 1: backward."""
    sizes = profile.gradient_bytes[1:-1]
    alike: dict[float, list[float]] = {}
    for block, *both in zip(on.blocks, on.forward_s, on.backward_s):
        alike.setdefault(sizes[block], []).append(both[way])
    found = []
    for block, size in enumerate(sizes):
        if size in alike:
            found.append(sum(alike[size]) / len(alike[size]))
            continue
        home = next(stage for stage in profile.stages if block in stage.blocks)
        found.append((home.backward_s if way else home.forward_s)[home.blocks.index(block)] * _ratio(home, on))
    return found
