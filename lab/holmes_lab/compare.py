"""The same training script run in several ways, alternating, so that the ways can be compared.

    repetition 1:  stock  holmes  all-RDMA
    repetition 2:  holmes  all-RDMA  stock       each run: a launch, `skip` warm-up steps, then measured steps
    repetition 3:  all-RDMA  stock  holmes

The figure of a run is the median of its measured steps; of a variant the median over its runs, with the least
and the greatest as spread.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from holmes_ext.cluster.spec import ClusterSpec, SiteSpec
from holmes_ext.errors import HolmesError
from holmes_lab.emulate import trace
from holmes_lab.gpu.job import Gpus
from holmes_lab.lab import Lab
from holmes_lab.network.crossing import TUNED
from holmes_lab.process.job import RunResult

#: Node -> NIC -> bytes (received, sent).
Counters = Mapping[str, Mapping[str, Sequence[int]]]


@dataclass(frozen=True)
class Variant:
    """One way to run the script. order: of the nodes for the launcher; flags: of the script."""

    name: str
    spec: SiteSpec
    order: tuple[str, ...]
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Series:
    """Of one variant. steps: seconds of each run's measured steps; losses: of the last run's steps; sent:
    node -> NIC -> bytes a step (last run, start-up included); lines: rank 0's of the last run; busy: share of
    this machine's cores that was used while steps were measured, of the run that used most."""

    name: str
    steps: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    sent: dict[str, dict[str, float]] = field(default_factory=dict)
    emulated: bool = False
    realtime: bool = True
    busy: float = 0.0
    lines: list[str] = field(default_factory=list)

    def add(
        self,
        seconds: Sequence[float],
        losses: list[float],
        skip: int,
        result: RunResult,
        before: Counters,
        after: Counters,
    ) -> None:
        """A run's steps, of which the first `skip` warm up; before, after: Lab.counters() around it."""
        self.steps.append(list(seconds[skip:]))
        self.losses = losses
        self.emulated, self.realtime = result.emulated, self.realtime and result.realtime
        self.busy = max(self.busy, result.busy_in_last(sum(self.steps[-1])))
        self.lines = [line for _, line in result.lines[0]]
        self.sent = {
            node: {nic: (after[node][nic][1] - before[node][nic][1]) / len(seconds) for nic in nics}
            for node, nics in after.items()
        }

    @property
    def medians(self) -> list[float]:
        return [statistics.median(run) for run in self.steps]

    @property
    def median(self) -> float:
        """Seconds for each step."""
        return statistics.median(self.medians)

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.medians), max(self.medians)

    @property
    def megabytes(self) -> tuple[float, float]:
        """MB that a node sent for each step, the mean over the nodes: on Ethernet, and on its fast NIC."""
        ethernet = sum(nics["eth0"] for nics in self.sent.values())
        everything = sum(sum(nics.values()) for nics in self.sent.values())
        return ethernet / len(self.sent) / 1e6, (everything - ethernet) / len(self.sent) / 1e6


def all_rdma(spec: SiteSpec) -> Variant:
    """The bound: stock on one cluster with the nodes of `spec` and its fastest fabric. GLOO_SOCKET_IFNAME
    names its NIC (NCCL would find it)."""
    best = max(spec.clusters, key=lambda cluster: cluster.rate_bps)
    nodes = tuple(spec.owner)
    cluster: ClusterSpec = replace(best, nodes=nodes, name="all", fabric="all")
    single = replace(spec, name=f"{spec.name}, all {best.kind}", clusters=(cluster,), overrides={})
    return Variant("all-RDMA", single, nodes, env={"GLOO_SOCKET_IFNAME": f"{best.kind}0"})


def tuned(spec: SiteSpec, scale: float = 1.0) -> Lab:
    """A lab whose nodes' TCP suits long links: what is compared is not how windows grow."""
    return Lab(spec, scale, realtime=True, sysctl=TUNED if spec.wan else {})


def compare(
    variants: Sequence[Variant],
    script: Sequence[str],
    *,
    repetitions: int,
    steps: int,
    skip: int,
    accelerator: Mapping[str, Any] | None,
    traces: Path | None = None,
    on_run: Callable[[str, int], None] = lambda name, repetition: None,
    timeout: float = 300.0,
    preload: Sequence[str] = ("torch", "deepspeed"),
    gpus: Gpus | None = None,
    scale: float = 1.0,
) -> dict[str, Series]:
    """Series of every variant, in the given order.

    script: path and arguments of a script that takes --steps N and --log FILE (JSON lines with "loss" and
    "seconds", as examples/deepspeed_pipeline); traces: a directory for DIR/VARIANT/rank*.json of each
    variant's last run; on_run is called before each run; preload: modules that are imported once for all runs
    of a cluster; gpus: emulated ones, in place of the CPU; scale: factor on every rate. HolmesError with the
    failing rank's last line when a run fails; timeout in seconds for one run.
    """
    series = {variant.name: Series(variant.name) for variant in variants}
    with ExitStack() as stack:
        labs: dict[str, Lab] = {}
        for variant in variants:
            if variant.spec.digest not in labs:
                labs[variant.spec.digest] = stack.enter_context(tuned(variant.spec, scale))
        for repetition in range(repetitions):
            turn = repetition % len(variants)
            for variant in (*variants[turn:], *variants[:turn]):
                on_run(variant.name, repetition)
                env = {
                    "DS_ACCELERATOR": "cuda" if gpus else "cpu",
                    "DS_BUILD_OPS": "0",
                    **variant.env,
                }
                if traces is not None and repetition == repetitions - 1:
                    (traces / variant.name).mkdir(parents=True, exist_ok=True)
                    env[trace.VARIABLE] = str(traces / variant.name)
                options = {
                    "env": env,
                    "preload": preload,
                    "timeout": timeout,
                    "accelerator": accelerator,
                    "gpus": gpus,
                }
                _run(
                    labs[variant.spec.digest],
                    variant,
                    script,
                    steps,
                    skip,
                    options,
                    series[variant.name],
                )
    return series


def _run(
    lab: Lab,
    variant: Variant,
    script: Sequence[str],
    steps: int,
    skip: int,
    options: Mapping[str, Any],
    series: Series,
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "log.jsonl")
        command = [
            sys.executable,
            *script,
            "--steps",
            str(steps),
            "--log",
            str(log),
            *variant.flags,
        ]
        before = lab.counters()
        result = lab.run(command, order=variant.order, **options)
        after = lab.counters()
        if result.returncode:
            raise HolmesError(_why(variant, result))
        records = [json.loads(line) for line in log.read_text().splitlines()]
    seconds, losses = ([record[key] for record in records] for key in ("seconds", "loss"))
    series.add(seconds, losses, skip, result, before, after)
    series.emulated |= options["gpus"] is not None


def _why(variant: Variant, result: RunResult) -> str:
    rank = result.first_failed if result.first_failed is not None else 0
    last = [line for _, line in result.lines[rank] if line.strip()][-1:] or ["nothing"]
    return f"the {variant.name} run ended with status {result.returncode}; rank {rank} said last: {last[0]}"


def max_loss_difference(a: Series, b: Series) -> float:
    """Greatest difference of the two variants' losses at any step."""
    assert len(a.losses) == len(b.losses)
    return max(abs(x - y) for x, y in zip(a.losses, b.losses))
