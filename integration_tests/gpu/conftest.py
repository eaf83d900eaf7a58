"""Fixtures for tests on emulated GPUs, which `make gpu` runs with a CUDA build of torch.

With a CPU build of torch, the tests of this folder are skipped. With HOLMES_TEST_CARRIER=cuda they use a
physical GPU, which has no watcher: deadlocks and races are then not reported.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import carriers
import pytest
import torch
from carriers import PHYSICAL
from clusters import toml
from holmes_lab import Lab
from holmes_lab.gpu import communicators
from holmes_lab.gpu.communicators import GroupNetwork, group_networks
from holmes_lab.gpu.job import Gpus
from holmes_lab.gpu.libraries import libraries
from holmes_lab.gpu.races import missing_waits
from holmes_lab.gpu.watcher import END_S, WatchedRun, Watcher, wait_watched
from holmes_lab.process.job import RunResult
from holmes_lab.process.ranks import nodes_of_ranks

from holmes_ext.cluster.spec import parse_spec

HERE = Path(__file__).parent
#: cluster.toml of two nodes with InfiniBand (two HCAs each), and two nodes with RoCE.
TOML = toml("a ib 4Gb/s a[0-1] rails=2", "b roce 2Gb/s b[0-1]", ethernet="1Gb/s", processes=2)

collect_ignore = [] if torch.version.cuda else [path.name for path in HERE.glob("test_*.py")]


@dataclass(frozen=True)
class Ran:
    """A job that has ended, and the reports of the emulated GPUs about it."""

    result: RunResult
    hang: tuple[str, ...]  # reasons for which the job was ended as a deadlock; () if it was not
    told: list[str]  # reports, while the job ran, of operations at which it stood still
    groups: list[GroupNetwork]  # NCCL's communicators with their networks
    sent: dict[str, dict[str, int]]  # node -> NIC -> bytes sent, headers included
    races: list[str]  # reports of missing waits

    @property
    def json(self) -> list[dict]:
        """Return the object in the last JSON line of each rank."""
        assert self.result.returncode == 0, self.said
        return [json.loads(lines.strip().splitlines()[-1]) for lines in self.result.stdout.values()]

    @property
    def said(self) -> str:
        """Return the end of each rank's output."""
        outputs = self.result.outputs.items()
        return "\n".join(f"--- rank {rank}\n{text[-3000:]}" for rank, text in outputs)


class GpuLab:
    """A lab whose jobs find emulated GPUs."""

    def __init__(self, lab: Lab, file: Path, gpus: Gpus):
        self.lab = lab
        self.file = file  # cluster.toml
        self.gpus = gpus
        self._start_lock = threading.Lock()

    def run(
        self,
        *command: str,
        order: str = "a0,b0,a1,b1",
        processes: int = 2,
        preload=("torch",),
        env=None,
        on_gpus: bool = True,
        gpus: Gpus | None = None,
        timeout: float = 600,
        end_s: float = END_S,
        **options,
    ) -> Ran:
        """Run a script on these nodes, and return the job when it has ended.

        Args:
            command: Path of the script and its arguments.
            order: Names of the nodes, in the order of the launcher's ranks.
            processes: Number of processes on each node.
            preload: Modules that are imported before a process is forked for each rank.
            on_gpus: Use emulated GPUs; otherwise CPUs and gloo.
            gpus: Emulated GPUs instead of the fixture's.
            timeout: Seconds after which the job is ended.
            end_s: Seconds without progress after which the job is ended as a deadlock.
        """
        names = order.split(",")
        job_gpus = None
        if on_gpus:
            job_gpus = gpus or self.gpus
        before = self.lab.counters()
        with self._start_lock:
            job = self.lab.start(
                [sys.executable, *command],
                order=names,
                processes=processes,
                preload=() if PHYSICAL else preload,
                env={"PYTEST_CURRENT_TEST": "", **(env or {})},
                gpus=job_gpus,
                timeout=timeout,
                **options,
            )
        reports: list[str] = []
        if job.watch is None or PHYSICAL:  # watch: folder of the emulated GPUs' records
            watched = WatchedRun(job.wait())
        else:
            labels = [f"{name}:{local}" for name in names for local in range(processes)]
            watcher = Watcher(job.watch, stall_s=1.0, end_s=end_s)
            watched = wait_watched(job, watcher, labels, reports.extend)

        after = self.lab.counters()
        sent = {}
        for name in names:
            sent_before = {nic: counters[1] for nic, counters in before[name].items()}
            sent_after = {nic: counters[1] for nic, counters in after[name].items()}
            sent[name] = {nic: sent_after[nic] - sent_before[nic] for nic in sent_after}
        groups: list[GroupNetwork] = []
        races: list[str] = []
        if job.watch:
            node_of = {node.name: node for node in self.lab.nodes}
            nodes = [node_of[name] for name in names]
            groups = group_networks(
                communicators.read(job.watch), nodes, nodes_of_ranks([processes] * len(nodes))
            )
            races = missing_waits(job.watch)
        return Ran(watched.result, watched.hang, reports, groups, sent, races)


@pytest.fixture(scope="session")
def gpus() -> Gpus | carriers.PhysicalGpu:
    if PHYSICAL:
        return carriers.gpus()
    carriers.skip_without_nccl_source()
    return Gpus(
        libraries([sys.executable], os.environ, on_progress=lambda *_: None), memory_mb=4096
    )


@pytest.fixture(scope="session")
def lab(gpus, tmp_path_factory):
    file = tmp_path_factory.mktemp("site") / "cluster.toml"
    text = TOML.replace("processes = 2", "processes = 1") if PHYSICAL else TOML
    file.write_text(text)
    with Lab(parse_spec(text)) as lab:
        yield GpuLab(lab, file, gpus)
