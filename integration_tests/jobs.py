"""Starts the jobs of the integration tests on emulated clusters, and reads what they print, log and send."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import pytest
from carriers import EMULATED, LESS_MEMORY, ON_GPUS, PHYSICAL, gpus
from packaging.version import Version
from selection import full as full
from selection import some as some

from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.lab import Lab, interleave
from holmes_ext.lab.gpu.watcher import Watcher, wait_watched

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "integration_tests" / "scripts"
CLUSTER = ROOT / "examples" / "clusters" / "two_clusters_4.toml"
#: Whether all exhaustive tests run. Over NCCL, the tests without the mark over_nccl then run, too.
FULL = os.environ.get("HOLMES_TEST_FULL") == "1"
#: Environment variables that name the device to DeepSpeed, which then compiles no operators for it.
FRAMEWORKS = {"DS_ACCELERATOR": "cuda" if ON_GPUS else "cpu", "DS_BUILD_OPS": "0"}
if ON_GPUS:
    FRAMEWORKS |= LESS_MEMORY
#: Mark of a test that runs over NCCL (HOLMES_TEST_CARRIER=nccl) without HOLMES_TEST_FULL=1, too.
over_nccl = pytest.mark.over_nccl


class LabOf:
    """An emulated site and its cluster file.

    Ranks alternate between the clusters (a0, b0, a1, b1), as a scheduler that knows no clusters may
    place them.
    """

    def __init__(self, file: Path, lab: Lab, spec: SiteSpec | None = None):
        """Use the nodes of the lab, or, with `spec`, only those that the file names."""
        self.file, self.lab, self.spec = file, lab, spec or lab.spec
        self.order = interleave(self.spec)
        #: The flags with which a script runs under holmes.
        self.holmes = ("--holmes", "--holmes-cluster", str(file))

    def _with(self, way, *command: str, preload=("torch",), env=None, **more):
        argv = list(command) if command[0] == "sh" else [sys.executable, *command]
        preload = () if command[0] == "sh" or PHYSICAL else preload
        # pytest's variable would give every test an environment, and so a preloaded Python, of its own
        env = {"PYTEST_CURRENT_TEST": "", **FRAMEWORKS, **(env or {})}
        if ON_GPUS:
            more.setdefault("gpus", gpus())
        return way(argv, **{"order": self.order, "preload": preload, "env": env, **more})

    def start(self, *command: str, **more):
        """Start a command on every node: a Python script with its arguments, or "sh" with its own."""
        return self._with(self.lab.start, *command, **more)

    def run(self, *command: str, timeout: float = 240, **more):
        """Run a command on every node and wait for its end.

        On emulated GPUs, a deadlock fails the test with the operations that wait for each other.
        """
        if not EMULATED:
            return follows_plan(self._with(self.lab.run, *command, timeout=timeout, **more))
        job = self.start(*command, timeout=3 * timeout, **more)
        labels = [f"{node}:{local}" for node in self.order for local in range(more.get("processes") or 1)]
        watched = wait_watched(job, Watcher(job.watch), labels, lambda lines: print("\n".join(lines)))
        assert not watched.hang, "\n".join(watched.hang)
        return follows_plan(watched.result)

    def json(self, result) -> list[dict]:
        """Return the JSON line that each rank printed last, sorted by the rank that the line gives."""
        assert result.returncode == 0, result.outputs
        lines = [json.loads(result.stdout[rank].strip().splitlines()[-1]) for rank in result.stdout]
        return sorted(lines, key=lambda line: line["rank"])

    def sent(self, before) -> dict[str, dict[str, float]]:
        """Return the MB that every NIC of every node sent since the counters `before` were read."""
        after = self.lab.counters()
        return {node: {nic: (after[node][nic][1] - before[node][nic][1]) / 1e6 for nic in nics}
                for node, nics in after.items()}


def lab_fixture(cluster: str | Path, scope: str = "module"):
    """Return a pytest fixture that starts the lab of a cluster.toml, given by path or as text."""

    @pytest.fixture(scope=scope)
    def started(tmp_path_factory):
        file = cluster
        if isinstance(cluster, str):
            file = tmp_path_factory.mktemp("clusters") / "cluster.toml"
            file.write_text(cluster)
        with Lab(load_spec(file)) as lab:
            yield LabOf(file, lab)

    return started


def follows_plan(result):
    """Return `result`. The test fails if the job printed a difference from its plan."""
    differences = [line for line in said(result) if "not as planned" in line]
    assert not differences, differences
    return result


def fast(nics) -> float:
    """Return the MB of a node's fast NIC: of its NICs besides eth0, the one with the most."""
    return max(mb for nic, mb in nics.items() if nic != "eth0")


def said(result) -> list[str]:
    """Return the lines that holmes printed on any rank."""
    return [line for output in result.outputs.values() for line in output.splitlines() if "holmes:" in line]


#: examples/deepspeed_pipeline, small.
TRAIN = str(ROOT / "examples" / "deepspeed_pipeline" / "train.py")
STEPS = 6
SIZE = (
    "--layers 4 --hidden 128 --heads 4 --sequence 16 "
    f"--micro-batch 2 --micro-batches 4 --steps {STEPS}"
).split()
PRELOAD = ("torch", "deepspeed")


def launch(clusters: LabOf, *command, env=None, **more):
    """Run a script that uses DeepSpeed."""
    return clusters.run(*command, preload=PRELOAD, env=env, **more)


def train(clusters: LabOf, log: Path, *flags, size=SIZE, expect: int = 0, **more) -> str:
    """Run the DeepSpeed example, and return what all ranks printed. It must end with status `expect`."""
    result = launch(clusters, TRAIN, *size, "--log", str(log), *flags, **more)
    text = "".join(result.outputs.values())
    assert result.returncode == expect, text
    return text


def losses(log: Path) -> list[float]:
    """Return the loss of every step from a log of JSON lines."""
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


def same(some_losses, others, tolerance: float = 1e-6) -> bool:
    """Return whether the losses of two runs agree in every step."""
    return max(abs(a - b) for a, b in zip(some_losses, others, strict=True)) <= tolerance


def stages_of(text: str) -> tuple[int, ...]:
    """Return the number of layers in each stage, as the DeepSpeed example prints them."""
    found = re.search(r"data \d+, stages of ([0-9+]+) layers", text)
    assert found, text
    return tuple(map(int, found[1].split("+")))


def megatron_core() -> Version | None:
    """Return the version of the megatron.core that would be imported, or None if there is none."""
    spec = find_spec("megatron.core") if find_spec("megatron") else None
    if spec is None or spec.origin is None:
        return None
    return Version(runpy.run_path(str(Path(spec.origin).with_name("package_info.py")))["__version__"])


#: Where megatron_cpu_shim is.
ON_CPU = str(ROOT / "examples" / "megatron_core" / "on_cpu")
#: A launch costs most of the time, so one launch of megatron-core trains several splits.
MATRIX = str(SCRIPTS / "megatron_matrix.py")
MEGATRON = "--layers 4 --hidden 32 --sequence 32 --micro-batch 2".split()
PRELOAD_MEGATRON = ("megatron_cpu_shim", *(f"megatron.core.{name}" for name in (
    "models.gpt", "optimizer", "distributed", "pipeline_parallel")))


#: How a GPU is told to run kernels in the order of their launches, or the host to wait for each.
ONE_AT_A_TIME = {name: {name: "1"} for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING")}
#: WAITS synchronize|empty_cache SCRIPT ARGS: each LayerNorm of the script waits for the device.
WAITS = str(ROOT / "integration_tests" / "gpu" / "waits.py")


def train_megatron(clusters: LabOf, directory: Path, splits, *flags, model=MEGATRON, returncode: int = 0,
                   through=(), options=MappingProxyType({}), **env):
    """Train each split ({name: "flags"}): results by split, MB that every NIC sent, and what all ranks
    printed. through: a script that runs the one behind it, and its arguments; options: of Lab.start."""
    commands = {name: [*model, *text.split()] for name, text in splits.items()}
    (directory / "splits.json").write_text(json.dumps(commands))
    before, results = clusters.lab.counters(), directory / "results.json"
    path = os.pathsep.join(filter(None, [ON_CPU, os.environ.get("PYTHONPATH", "")]))
    command = (*through, MATRIX, str(directory / "splits.json"), str(results), *flags)
    result = clusters.run(*command, preload=PRELOAD_MEGATRON, timeout=600, **options,
                          env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env})
    told = "\n".join(f"{rank}: {text[-3000:]}" for rank, text in result.outputs.items())
    assert result.returncode == returncode, told
    done = json.loads(results.read_text()) if results.exists() else {}
    return done, clusters.sent(before), "\n".join(result.outputs.values())
