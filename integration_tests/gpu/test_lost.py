"""Tests what holmes says when an NCCL communicator ends: a rank is lost, or the program aborts the group."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from integration_tests.jobs import full

#: Whether torch calls holmes before it ends the process. Older versions wait for a minute before.
HAS_HOOKS = torch.__version__ >= (2, 15)
LOST = str(Path(__file__).with_name("lost.py"))


def run(lab, scene, **environment):
    """Run a scene of lost.py with holmes on two nodes of two ranks each."""
    flags = ("--holmes", "--holmes-cluster", str(lab.file))
    return lab.run(LOST, scene, *flags, order="a0,b0", env=environment)


@pytest.mark.parametrize("scene", [
    pytest.param("abort_idle_group", marks=full),
    "abort_busy_group",
    pytest.param("abort_busy_backend", marks=full),
    pytest.param("abort_all_groups", marks=full),
])  # fmt: skip
def test_a_group_that_the_program_aborts_is_not_reported(lab, scene):
    ran = run(lab, scene)
    assert set(ran.result.statuses.values()) == {0} and ran.said.count("survived") == 4, ran.said
    assert "is lost" not in "".join(ran.result.outputs.values()), ran.said


def test_a_lost_rank_is_reported_before_torch_ends_the_process(lab):
    """With the variable, torch 2.15 ends the process as soon as its abort hooks return."""
    at_once = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"} if HAS_HOOKS else {}
    ran = run(lab, "lose_a_rank", **at_once)
    told = "".join(ran.result.outputs.values())
    assert "is lost: NCCL's COMM_ERROR in the group of ranks 0, 1, 2, 3" in told, told
    assert "torchfrtrace --allow-incomplete-ranks" in told, told


def test_the_flight_recorder_shows_which_operations_differ(lab, tmp_path):
    """The files are where holmes says, and the command that holmes names reads them."""
    prefix = tmp_path / "trace_"
    environment = {
        "PYTEST_CURRENT_TEST": "",
        "TIMEOUT_S": "12",
        "TORCH_FR_DUMP_TEMP_FILE": str(prefix),
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "3000",
    }
    command = [
        sys.executable,
        LOST,
        "call_different_operations",
        "--holmes",
        "--holmes-cluster",
        str(lab.file),
    ]
    # Not by lab.run(): it would end the job as a deadlock, before NCCL times out.
    job = lab.lab.start(command, order=["a0", "b0"], processes=2, env=environment, gpus=lab.gpus, grace=60)
    told = "".join(job.wait().outputs.values())
    line = f"torch writes the last operations of rank 3 to {prefix}3"
    assert line in told and "--prefix trace_ FOLDER" in told, told

    reader = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
    arguments = ["--allow-incomplete-ranks", "--prefix", "trace_", str(tmp_path)]
    report = subprocess.run([*reader, *arguments], text=True, capture_output=True)
    assert "COLLECTIVE_TYPE_MISMATCH" in report.stdout + report.stderr, report
