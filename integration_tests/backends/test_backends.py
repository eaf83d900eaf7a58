"""Trains with each framework over each backend that a script can give init_process_group for NCCL.

Since torch 2.14, NCCL's backend has several implementations, with names such as "nccl2" and "nccl-lazy". With
each of them, a job must have the same losses with holmes as without. Process groups inside a cluster must use
the network of the cluster.
"""

from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from carriers import gpu_only
from packaging.version import Version

from integration_tests.jobs import ROOT, full
from integration_tests.rows.job import STEPS, Job, Runs, StartInLab
from integration_tests.rows.jobs import JOBS


def torch_version() -> Version:
    """Return the version of the installed torch, without importing it."""
    return Version(Version(metadata.version("torch")).base_version)


pytestmark = [gpu_only, pytest.mark.over_nccl, pytest.mark.timeout(1800)]

WITH_BACKEND = str(ROOT / "integration_tests" / "backends" / "with_backend.py")
MESSAGES = str(ROOT / "integration_tests" / "backends" / "messages.py")
#: Name of an engine -> name of its job among those of README's table.
ENGINES = {
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "deepspeed pipeline": "DeepSpeed's pipeline engine",
    "deepspeed zero 1": "DeepSpeed's ZeRO 0 to 3, ZeRO 1",
    "megatron-core": "megatron-core, --holmes",
    "torch pipelining": "torch's pipelining",
}
BACKENDS = ("nccl", "cpu:gloo,cuda:nccl")
#: Names that exist since torch 2.14.
NEW_BACKENDS = ("nccl2", "nccl-lazy", "nccl-legacy", "cpu:gloo,cuda:nccl2")
#: With this environment variable, "nccl" is another implementation than by default: nccl-legacy in torch
#: 2.15, nccl2 in torch 2.14.
OTHER_NCCL = f"TORCH_DIST_USE_NCCL2={0 if torch_version() >= Version('2.15') else 1}"


def has_new_backends() -> bool:
    return torch_version() >= Version("2.14")


def combinations():
    """Return a parameter for each engine and backend. Without HOLMES_TEST_FULL=1, DDP alone runs."""
    backends = [*BACKENDS]
    if has_new_backends():
        backends += [*NEW_BACKENDS, OTHER_NCCL]
    parameters = []
    for engine in ENGINES:
        for backend in backends:
            marks = () if engine == "ddp" and backend in ("nccl", "nccl-lazy") else full
            parameters.append(pytest.param(engine, backend, id=f"{engine}-{backend}", marks=marks))
    return parameters


def job_with(engine: str, backend: str, other_devices: bool = False) -> Job:
    """Return a training job whose script runs by with_backend.py, which replaces the script's backend.

    Args:
        engine: What trains: a key of ENGINES, such as "ddp".
        backend: The new backend, such as "nccl2"; or "VARIABLE=VALUE" for "nccl" with this variable set.
        other_devices: Whether each rank uses another GPU than the one with the number LOCAL_RANK.
    """
    job = next(job for job in JOBS if job.name == ENGINES[engine])
    env = {}
    if "=" in backend:
        variable, value = backend.split("=")
        env[variable] = value
        backend = "nccl"
    arguments_of_wrapper = (backend, "1" if other_devices else "0")

    def command(folder):
        original = job.command(folder)
        words = (WITH_BACKEND, *arguments_of_wrapper, *original.words)
        return replace(original, words=words, env={**original.env, **env})

    # Saving checkpoints would take time.
    return replace(job, command=command, checkpoints=None)


class StartOnTwoNodes(StartInLab):
    """Starts two processes on each of two nodes, one of each cluster."""

    def __call__(self, job, command, arguments, env, shell):
        return self.clusters.run(
            *arguments,
            preload=command.preload,
            env=env,
            cwd=command.inside,
            order=["a0", "b0"],
            processes=2,
        )


@pytest.fixture(scope="module")
def losses_by_engine():
    """Return an empty dict: engine -> its losses without holmes, over the backend "nccl"."""
    return {}  # the first test of an engine adds them


def runs_of(job: Job, start: StartInLab, folder: Path) -> Runs:
    """Return the runs of a job. A run starts when a test first reads its losses."""
    return Runs(job=job, start=start, folder=folder, on_gpus=True)


def assert_close(losses: list[float], expected: list[float]) -> None:
    assert len(expected) == STEPS
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= 1e-6, (
        losses,
        expected,
    )


@pytest.mark.parametrize("engine, backend", combinations())
def test_losses_do_not_change_and_groups_use_their_networks(
    two_clusters, losses_by_engine, tmp_path, tmp_path_factory, engine, backend
):
    """A job learns the same with holmes. Groups inside a cluster use the network of the cluster."""
    job_with(engine, backend).skip_if_not_installed()
    start = StartInLab(two_clusters)
    if engine not in losses_by_engine:
        runs_over_nccl = runs_of(job_with(engine, "nccl"), start, tmp_path_factory.mktemp("stock"))
        losses_by_engine[engine] = runs_over_nccl.stock.losses  # trains without holmes

    runs = runs_of(job_with(engine, backend), start, tmp_path)
    before = two_clusters.lab.counters()
    losses = runs.holmes.losses  # trains with holmes
    mb_by_node = two_clusters.sent(before)
    assert_close(losses, losses_by_engine[engine])
    for node, nics in mb_by_node.items():
        fast_mb = max(mb for nic, mb in nics.items() if nic != "eth0")
        assert fast_mb > 0.1, (node, nics)  # gradients or weights stay inside the clusters
    reported = {(row["kind"], row["where"], row["fabric"]) for row in runs.report_json["rows"]}
    assert reported >= {(group.kind, group.where, group.fabric) for group in runs.job.groups}
    assert runs.report_json["done"]["differences"] == []


@pytest.mark.skipif(not has_new_backends(), reason="nccl-lazy is new in torch 2.14")
def test_a_message_inside_a_cluster_uses_the_network_of_the_cluster(two_clusters):
    """nccl-lazy makes a communicator for two ranks, with the network of the whole group: here Ethernet."""
    before = two_clusters.lab.counters()
    ranks = two_clusters.json(two_clusters.run(MESSAGES, *two_clusters.holmes))
    assert [rank["is_right"] for rank in ranks] == [True] * 4
    for node, nics in two_clusters.sent(before).items():
        sends = node in ("a0", "b0")  # each sends 8 MB to the other node of its cluster
        fast_mb = max(mb for nic, mb in nics.items() if nic != "eth0")
        assert (fast_mb > 8) is sends, (node, nics)
        assert nics["eth0"] < 1, (node, nics)


@full
@pytest.mark.parametrize("engine", ENGINES)
def test_a_device_other_than_local_rank(two_clusters, tmp_path, engine):
    """Groups that holmes makes are on the GPU that the job uses, not on the one with number LOCAL_RANK."""
    job = job_with(engine, "nccl", other_devices=True)
    job.skip_if_not_installed()
    runs = runs_of(job, StartOnTwoNodes(two_clusters), tmp_path)
    assert_close(runs.holmes.losses, runs.stock.losses)
