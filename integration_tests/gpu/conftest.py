"""Emulated GPUs under the Python that runs the tests: `make gpu` (skipped where torch is built for the
CPU). Of a physical one (HOLMES_TEST_CARRIER=cuda) nobody tells what it does."""

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

from holmes_ext.cluster.spec import parse_spec

HERE = Path(__file__).parent
#: Two nodes with InfiniBand (two HCAs each), two with RoCE.
TOML = toml("a ib 4Gb/s a[0-1] rails=2", "b roce 2Gb/s b[0-1]", ethernet="1Gb/s", processes=2)

collect_ignore = [] if torch.version.cuda else [path.name for path in HERE.glob("test_*.py")]


@dataclass(frozen=True)
class Ran:
    """A job that has ended. hang: why it was ended; told: what it was told to stand at; sent: node -> NIC ->
    bytes, headers included; races: missing waits that were found."""

    result: RunResult
    hang: tuple[str, ...]
    told: list[str]
    groups: list[GroupNetwork]
    sent: dict[str, dict[str, int]]
    races: list[str]

    @property
    def json(self) -> list[dict]:
        """The JSON line that each rank printed last."""
        assert self.result.returncode == 0, self.said
        return [json.loads(lines.strip().splitlines()[-1]) for lines in self.result.stdout.values()]

    @property
    def said(self) -> str:
        return "\n".join(
            f"--- rank {rank}\n{text[-3000:]}" for rank, text in self.result.outputs.items()
        )


class GpuLab:
    """A lab whose jobs find emulated GPUs."""

    def __init__(self, lab: Lab, file: Path, gpus: Gpus):
        self.lab, self.file, self.gpus, self._starts = lab, file, gpus, threading.Lock()

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
        """A script's path and arguments on these nodes; on the CPU and gloo if not `on_gpus`. end_s: seconds
        without progress after which it is ended."""
        env, preload = {"PYTEST_CURRENT_TEST": "", **(env or {})}, () if PHYSICAL else preload
        nodes, before = order.split(","), self.lab.counters()
        with self._starts:
            job = self.lab.start(
                [sys.executable, *command],
                order=nodes,
                processes=processes,
                preload=preload,
                env=env,
                gpus=(gpus or self.gpus) if on_gpus else None,
                timeout=timeout,
                **options,
            )
        labels: list[str] = [f"{node}:{local}" for node in nodes for local in range(processes)]
        told: list[str] = []
        watched = (
            WatchedRun(job.wait())
            if job.watch is None or PHYSICAL
            else wait_watched(
                job, Watcher(job.watch, stall_s=1.0, end_s=end_s), labels, told.extend
            )
        )
        result, after = watched.result, self.lab.counters()
        placed = [next(node for node in self.lab.nodes if node.name == name) for name in nodes]
        groups = (
            group_networks(communicators.read(job.watch), placed, processes) if job.watch else []
        )
        sent = {
            name: {nic: after[name][nic][1] - before[name][nic][1] for nic in after[name]}
            for name in nodes
        }
        races = missing_waits(job.watch) if job.watch else []
        return Ran(result, watched.hang, told, groups, sent, races)


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
