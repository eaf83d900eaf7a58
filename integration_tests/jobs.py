"""Helpers of the integration tests: start training jobs on emulated clusters and read their output.

The clusters are emulated by the lab (holmes_lab): each node is a network namespace of this machine. The
helpers read what a job prints, its log of losses, and the bytes that each emulated NIC sent.
"""

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
from holmes_lab import Lab, interleave
from holmes_lab.gpu.watcher import Watcher, wait_watched
from holmes_lab.process.fork_server import SKIP_TEARDOWN
from packaging.version import Version
from selection import full as full
from selection import some as some

from holmes_ext.cluster.spec import SiteSpec, load_spec

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "integration_tests" / "scripts"
CLUSTER = ROOT / "examples" / "clusters" / "two_clusters_4.toml"
#: Whether all exhaustive tests run. Over NCCL, the tests without the mark over_nccl then run, too.
FULL = os.environ.get("HOLMES_TEST_FULL") == "1"
#: Environment variables that name the device to DeepSpeed, which then compiles no operators for it.
FRAMEWORKS = {"DS_ACCELERATOR": "cuda" if ON_GPUS else "cpu", "DS_BUILD_OPS": "0"}
if ON_GPUS:
    FRAMEWORKS |= LESS_MEMORY
#: Whether preloaded ranks end without destroying their modules: a quarter of a short job is spent on that.
#: On GPUs, NCCL and the emulated GPU are part of that end.
SKIPS_TEARDOWN = "0" if FULL or ON_GPUS else "1"
#: Mark of a test that runs over NCCL (HOLMES_TEST_CARRIER=nccl) without HOLMES_TEST_FULL=1, too.
over_nccl = pytest.mark.over_nccl


class LabOf:
    """Emulated nodes on which tests start jobs, and the cluster.toml that describes these nodes.

    Consecutive ranks are on nodes of different clusters (a0, b0, a1, b1), as if the scheduler did not know
    of clusters. Holmes must then renumber the ranks.
    """

    def __init__(self, file: Path, lab: Lab, spec: SiteSpec | None = None):
        """Use all nodes of an emulated cluster, or only some of them.

        Args:
            lab: The emulated cluster. Its nodes are already running.
            file: The cluster.toml that describes the nodes.
            spec: Contents of `file`, if the file names only some of the nodes.
        """
        self.file = file
        self.lab = lab
        self.spec = spec or lab.spec
        self.order = interleave(self.spec)  # nodes by rank, alternating between the clusters
        #: The flags with which a script trains with holmes.
        self.holmes = ("--holmes", "--holmes-cluster", str(file))

    def _with(self, way, *command: str, preload=("torch",), env=None, **more):
        """Call `way` (Lab.start or Lab.run) with the nodes, environment and GPUs of all tests."""
        argv = list(command) if command[0] == "sh" else [sys.executable, *command]
        preload = () if command[0] == "sh" or PHYSICAL else preload
        # Jobs with equal environments share a preloaded Python: pytest's variable must not differ.
        env = {
            "PYTEST_CURRENT_TEST": "",
            SKIP_TEARDOWN: SKIPS_TEARDOWN,
            **FRAMEWORKS,
            **(env or {}),
        }
        if ON_GPUS:
            more.setdefault("gpus", gpus())
        return way(argv, **{"order": self.order, "preload": preload, "env": env, **more})

    def start(self, *command: str, **more):
        """Start one command on all nodes and return the running job.

        Args:
            command: A Python script and its arguments, or "sh" and its arguments.
        """
        return self._with(self.lab.start, *command, **more)

    def run(self, *command: str, timeout: float = 240, **more):
        """Run one command on all nodes, wait for its end and return its result.

        The test fails if ranks on emulated GPUs wait for each other in a circle, or if the job ran otherwise
        than holmes planned.
        """
        if not EMULATED:  # the job does not use emulated GPUs
            return follows_plan(self._with(self.lab.run, *command, timeout=timeout, **more))
        job = self.start(*command, timeout=3 * timeout, **more)  # emulated GPUs are slow
        # Names of the ranks in messages, such as "a0:1" for the second process of node a0.
        processes = more.get("processes")
        labels = [
            f"{node}:{local}"
            for node in self.order
            for local in range(processes or self.spec.cluster_of(node).processes)
        ]
        # The watcher reads what each emulated GPU executes. It ends a job that hangs, and reports the reason.
        watcher = Watcher(job.watch)
        watched = wait_watched(
            job, watcher, labels, print_lines=lambda lines: print("\n".join(lines))
        )
        assert not watched.hang, "\n".join(watched.hang)
        return follows_plan(watched.result)

    def json(self, result) -> list[dict]:
        """Return the last line of each rank's standard output, parsed as JSON, sorted by the key "rank"."""
        assert result.returncode == 0, result.outputs
        lines = [json.loads(result.stdout[rank].strip().splitlines()[-1]) for rank in result.stdout]
        return sorted(lines, key=lambda line: line["rank"])

    def sent(self, before) -> dict[str, dict[str, float]]:
        """Return the MB that each NIC has sent since `before`: node -> name of the NIC -> MB.

        Args:
            before: The result of an earlier call of `self.lab.counters()`.
        """
        after = self.lab.counters()
        return {
            node: {nic: (after[node][nic][1] - before[node][nic][1]) / 1e6 for nic in nics}
            for node, nics in after.items()
        }


def lab_fixture(cluster: str | Path, scope: str = "module"):
    """Return a pytest fixture that emulates a cluster and yields a LabOf, which starts jobs on the nodes.

    Args:
        cluster: Path of a cluster.toml, or its text.
        scope: Scope of the fixture.
    """

    @pytest.fixture(scope=scope)
    def started(tmp_path_factory):
        file = cluster
        if isinstance(cluster, str):
            file = tmp_path_factory.mktemp("clusters") / "cluster.toml"
            file.write_text(cluster)
        with Lab(load_spec(file)) as lab:  # starts the nodes, and stops them after the last test
            yield LabOf(file, lab)

    return started


def follows_plan(result):
    """Assert that a job ran as holmes planned, and return its result.

    Holmes prints a line with "not as planned" for each difference, such as a group on another network.
    """
    differences = [line for line in said(result) if "not as planned" in line]
    assert not differences, differences
    return result


def fast(nics) -> float:
    """Return the MB that a node's InfiniBand or RoCE NIC sent; with several such NICs, the largest number.

    Args:
        nics: Name of each NIC of the node -> MB that it sent. The name of the Ethernet NIC is eth0.
    """
    return max(mb for nic, mb in nics.items() if nic != "eth0")


def said(result) -> list[str]:
    """Return the messages that holmes printed on all ranks of a finished job."""
    return [
        line
        for output in result.outputs.values()
        for line in output.splitlines()
        if "holmes:" in line
    ]


#: examples/deepspeed_pipeline, small.
TRAIN = str(ROOT / "examples" / "deepspeed_pipeline" / "train.py")
STEPS = 6
SIZE = (
    "--layers 4 --hidden 128 --heads 4 --sequence 16 "
    f"--micro-batch 2 --micro-batches 4 --steps {STEPS}"
).split()
PRELOAD = ("torch", "deepspeed")


def launch(clusters: LabOf, *command, env=None, **more):
    """Run a script on all nodes, in processes that have already imported torch and DeepSpeed."""
    return clusters.run(*command, preload=PRELOAD, env=env, **more)


def train(clusters: LabOf, log: Path, *flags, size=SIZE, expect: int = 0, **more) -> str:
    """Run examples/deepspeed_pipeline/train.py on all nodes and return the output of all ranks as one text.

    Args:
        log: File into which the job writes its losses.
        flags: Further flags of the job.
        size: Flags for the size of the model and the number of steps.
        expect: Exit status that the job must have.
    """
    result = launch(clusters, TRAIN, *size, "--log", str(log), *flags, **more)
    text = "".join(result.outputs.values())
    assert result.returncode == expect, text
    return text


def losses(log: Path) -> list[float]:
    """Return the loss of every step from a log file with one JSON object per step."""
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


def same(some_losses, others, tolerance: float = 1e-6) -> bool:
    """Return whether two runs have the same losses in all steps, each within `tolerance`."""
    return max(abs(a - b) for a, b in zip(some_losses, others, strict=True)) <= tolerance


def stages_of(text: str) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage from the output of the DeepSpeed example."""
    match = re.search(r"data \d+, stages of ([0-9+]+) layers", text)
    assert match, text
    return tuple(map(int, match[1].split("+")))


def megatron_core() -> Version | None:
    """Return the version of the installed megatron-core without importing it, or None if it is missing."""
    spec = find_spec("megatron.core") if find_spec("megatron") else None
    if spec is None or spec.origin is None:
        return None
    package_info = runpy.run_path(str(Path(spec.origin).with_name("package_info.py")))
    return Version(package_info["__version__"])


#: Folder of the module megatron_cpu_shim.
ON_CPU = str(ROOT / "examples" / "megatron_core" / "on_cpu")
#: A launch costs most of the time, so one launch of megatron-core trains several splits.
MATRIX = str(SCRIPTS / "megatron_matrix.py")
MEGATRON = "--layers 4 --hidden 32 --sequence 32 --micro-batch 2".split()
PRELOAD_MEGATRON = (
    "megatron_cpu_shim",
    *(
        f"megatron.core.{name}"
        for name in ("models.gpt", "optimizer", "distributed", "pipeline_parallel")
    ),
)


#: Variables that make a GPU run kernels in the order of their launches, or the host wait for each of them.
ONE_AT_A_TIME = {
    name: {name: "1"} for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING")
}
#: WAITS synchronize|empty_cache SCRIPT ARGS: each LayerNorm of the script waits for the device.
WAITS = str(ROOT / "integration_tests" / "gpu" / "waits.py")


def train_megatron(
    clusters: LabOf,
    directory: Path,
    splits,
    *flags,
    model=MEGATRON,
    returncode: int = 0,
    through=(),
    options=MappingProxyType({}),
    **env,
):
    """Train megatron-core once for each split of the model, all in the same processes.

    Args:
        directory: Folder for the files of the job.
        splits: Name of a split -> flags of the example.
        model: Flags for the size of the model.
        through: A script that runs the script behind it, and its arguments.
        options: Options of Lab.start.
        env: Further environment variables.

    Returns:
        Results by name of the split; MB that every NIC sent (node -> NIC -> MB); output of all ranks.
    """
    commands = {name: [*model, *text.split()] for name, text in splits.items()}
    (directory / "splits.json").write_text(json.dumps(commands))
    before = clusters.lab.counters()
    results = directory / "results.json"
    path = os.pathsep.join(filter(None, [ON_CPU, os.environ.get("PYTHONPATH", "")]))
    command = (*through, MATRIX, str(directory / "splits.json"), str(results), *flags)
    result = clusters.run(
        *command,
        preload=PRELOAD_MEGATRON,
        timeout=600,
        **options,
        env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env},
    )
    ends = "\n".join(f"{rank}: {text[-3000:]}" for rank, text in result.outputs.items())
    assert result.returncode == returncode, ends
    result_of_split = json.loads(results.read_text()) if results.exists() else {}
    return result_of_split, clusters.sent(before), "\n".join(result.outputs.values())
