"""Comparison of the step times of several variants of a training job, on emulated clusters.

The usual variants are:

    stock       on clusters with different NICs, without holmes (the package that this repository
                provides)
    holmes      on the same clusters, with holmes
    all-RDMA    without holmes on one cluster, where all nodes have the fastest NICs: the upper
                bound

The variants run in turn, in rotated order, so that a change of this machine's speed favours none:

    repetition 1:  stock  holmes  all-RDMA
    repetition 2:  holmes  all-RDMA  stock
    repetition 3:  all-RDMA  stock  holmes

Each run is a launch with `skip` steps for warming up, and then measured steps. The step time of a run is
the median of its measured steps. The step time of a variant is the median of its runs, with the smallest
and the largest as spread.
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
from typing import Any, NamedTuple

from holmes_ext.cluster.spec import ClusterSpec, SiteSpec
from holmes_ext.errors import HolmesError
from holmes_lab.emulate import trace
from holmes_lab.gpu.job import Gpus
from holmes_lab.lab import Lab
from holmes_lab.network.inter_cluster import TUNED
from holmes_lab.process.job import RunResult

#: Largest difference of two runs' losses that rounding explains: they add the same numbers in another order.
LOSS_TOLERANCE = 1e-6
#: Node -> NIC -> bytes (received, sent).
Counters = Mapping[str, Mapping[str, Sequence[int]]]


@dataclass(frozen=True)
class Variant:
    """One way to run a training script: its clusters, flags and environment."""

    name: str
    spec: SiteSpec  # the emulated clusters
    order: tuple[str, ...]  # nodes in the order of their ranks
    flags: tuple[str, ...] = ()  # further arguments of the script
    env: Mapping[str, str] = field(default_factory=dict)  # further environment variables


class SentMegabytes(NamedTuple):
    """MB that a node sends in a step."""

    ethernet: float
    fast_nics: float  # InfiniBand or RoCE


@dataclass
class Series:
    """Measurements of all runs of one variant, such as "stock" or "holmes".

    Step times vary from run to run, so the step times of all runs are kept. Losses, traffic and
    output are kept of the last run only.
    """

    name: str
    steps: list[list[float]] = field(default_factory=list)  # run -> seconds of its measured steps
    losses: list[float] = field(default_factory=list)  # of all steps of the last run
    #: Node -> NIC -> bytes sent in the last run, from its start to its end, divided by its steps.
    sent: dict[str, dict[str, float]] = field(default_factory=dict)
    emulated: bool = False  # whether the compute was emulated
    realtime: bool = True  # whether all ranks ran under SCHED_RR
    #: Share of this machine's cores in use while steps were measured, in the run with the largest share.
    busy: float = 0.0
    lines: list[str] = field(default_factory=list)  # output of rank 0 in the last run

    def add(
        self,
        seconds: Sequence[float],
        losses: list[float],
        skip: int,
        result: RunResult,
        before: Counters,
        after: Counters,
    ) -> None:
        """Add the measurements of a run.

        The step times are appended to those of earlier runs. `realtime` stays true only if it is
        true of each run, and `busy` is the largest share of all runs. The other values replace
        those of the run before: the losses, the output of rank 0, the traffic of a step, and
        `emulated`, which is the same in all runs.

        Args:
            seconds: Seconds of all steps.
            losses: Losses of all steps.
            skip: Number of first steps. They warm up, and their times are not measured.
            result: Result of the job: its output, whether compute was emulated, whether all ranks
                ran in real time (SCHED_RR), and how busy this machine's cores were.
            before, after: Bytes of each NIC before and after the job. They cover the warm-up, too.
        """
        measured_seconds = list(seconds[skip:])
        self.steps.append(measured_seconds)
        self.losses = losses
        self.emulated = result.emulated
        self.realtime = self.realtime and result.realtime
        # The measured steps are the last of the job, so the share of busy cores is taken from
        # there.
        self.busy = max(self.busy, result.busy_in_last(sum(measured_seconds)))
        rank_0_lines = result.lines[0]
        self.lines = [line for _stream, line in rank_0_lines]
        step_count = len(seconds)
        self.sent = {}  # node -> NIC -> bytes in a step
        for node, nics in after.items():
            self.sent[node] = {}
            for nic, (_, sent_after) in nics.items():
                _, sent_before = before[node][nic]
                self.sent[node][nic] = (sent_after - sent_before) / step_count

    @property
    def medians(self) -> list[float]:
        """The median step time of each run, in seconds."""
        return [statistics.median(run) for run in self.steps]

    @property
    def median(self) -> float:
        """The step time of the variant in seconds: the median of the runs' medians."""
        return statistics.median(self.medians)

    @property
    def spread(self) -> tuple[float, float]:
        """The smallest and the largest of the runs' medians, in seconds."""
        return min(self.medians), max(self.medians)

    @property
    def megabytes(self) -> SentMegabytes:
        """MB that a node sends in a step, as the mean of the nodes."""
        ethernet = sum(nics["eth0"] for nics in self.sent.values())
        everything = sum(sum(nics.values()) for nics in self.sent.values())
        node_count = len(self.sent)
        return SentMegabytes(
            ethernet=ethernet / node_count / 1e6,
            fast_nics=(everything - ethernet) / node_count / 1e6,
        )


def all_rdma(spec: SiteSpec) -> Variant:
    """Return the variant that no other can beat: all nodes in one cluster with the fastest network.

    The job runs without holmes. GLOO_SOCKET_IFNAME names the fast NIC, because gloo would choose Ethernet.
    """
    best = max(spec.clusters, key=lambda cluster: cluster.rate_bps)
    nodes = tuple(spec.cluster_by_node)
    cluster: ClusterSpec = replace(best, nodes=nodes, name="all", fabric="all")
    single = replace(spec, name=f"{spec.name}, all {best.kind}", clusters=(cluster,), overrides={})
    return Variant("all-RDMA", single, nodes, env={"GLOO_SOCKET_IFNAME": f"{best.kind}0"})


def lab_for_measurements(spec: SiteSpec, scale: float = 1.0) -> Lab:
    """Return a lab in which ranks run in real time, and TCP is tuned if there are links between clusters.

    With the default settings of TCP, measurements over links with long round trips would mainly
    show how TCP's windows grow. The lab's nodes exist inside its `with` block.

    Args:
        spec: The site.
        scale: Factor of all rates.
    """
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
    """Run all variants in turn, and return variant -> measurements, in the given order.

    Args:
        script: Path and arguments of a training script. It must take --steps N and --log FILE, and write a
            line of JSON with "loss" and "seconds" for each step, as examples/deepspeed_pipeline does.
        repetitions: Runs of each variant.
        steps: Steps of a run.
        skip: First steps of a run, not measured.
        accelerator: Settings of the emulated accelerator (emulate/accelerator.py); None: none.
        traces: Folder for the traces (emulate/trace.py) of each variant's last run, as VARIANT/rank*.json.
        on_run: Called with the name of the variant and the number of the repetition before each run.
        timeout: Seconds of one run.
        preload: Modules that are imported once for all runs on the same clusters.
        gpus: Emulated GPUs that the job uses in place of the CPU.
        scale: Factor of all rates.

    Raises:
        HolmesError: A run failed. The message has the last line of the rank that failed first.
    """
    series = {variant.name: Series(variant.name) for variant in variants}
    with ExitStack() as stack:
        labs: dict[
            str, Lab
        ] = {}  # hash of the clusters' description -> the lab that its variants share
        for variant in variants:
            if variant.spec.digest not in labs:
                labs[variant.spec.digest] = stack.enter_context(
                    lab_for_measurements(variant.spec, scale)
                )
        for repetition in range(repetitions):
            first = repetition % len(variants)
            for variant in (*variants[first:], *variants[:first]):
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
                    steps=steps,
                    skip=skip,
                    options=options,
                    series=series[variant.name],
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
    """Run a variant of a training job once, and add its measurements to `series`.

    Args:
        lab: The emulated clusters of the variant.
        variant: The order of the nodes, and flags for the script.
        script: Path and arguments of the training script. It takes --steps N and --log FILE, and
            writes a line of JSON with "loss" and "seconds" for each step.
        steps: Steps of the run.
        skip: First steps. They warm up, and are not measured.
        options: Keyword arguments of Lab.run(), with "gpus": emulated GPUs, or None.
        series: Gets the measurements.

    Raises:
        HolmesError: The run failed.
    """
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
            raise HolmesError(_failure_message(variant, result))
        records = [json.loads(line) for line in log.read_text().splitlines()]
    seconds = [record["seconds"] for record in records]
    losses = [record["loss"] for record in records]
    series.add(seconds, losses, skip, result, before, after)
    if options["gpus"] is not None:
        series.emulated = (
            True  # RunResult.emulated covers only the other kind, emulated accelerators
        )


def _failure_message(variant: Variant, result: RunResult) -> str:
    rank = result.first_failed if result.first_failed is not None else 0
    last = [line for _, line in result.lines[rank] if line.strip()][-1:] or ["nothing"]
    return f"the {variant.name} run ended with status {result.returncode}; rank {rank} said last: {last[0]}"


def max_loss_difference(a: Series, b: Series) -> float:
    """Return the largest difference between the losses of two variants in the same step."""
    assert len(a.losses) == len(b.losses)
    return max(abs(x - y) for x, y in zip(a.losses, b.losses))
