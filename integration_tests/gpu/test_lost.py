"""Tests that holmes reports a failure of NCCL, but not a process group that the program aborts itself.

The jobs run the cases of lost.py on two nodes of two ranks each.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from integration_tests.jobs import full

#: Whether the backend "nccl" calls abort hooks, by which holmes reports a failure at once. Older releases of
#: torch wait for a minute before they abort the process, so that holmes can poll NCCL meanwhile.
HAS_ABORT_HOOKS = torch.__version__ >= (2, 15)
SCRIPT = str(Path(__file__).with_name("lost.py"))


def run_case(lab, case, **environment):
    """Run a case of lost.py under holmes on four ranks, and return the job that has ended.

    Args:
        lab: The fixture `lab`: emulated nodes with emulated GPUs.
        case: The name of the case.
        environment: Environment variables of all ranks.
    """
    flags = ("--holmes", "--holmes-cluster", str(lab.file))
    return lab.run(SCRIPT, case, *flags, order="a0,b0", env=environment)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("abort_idle_group", marks=full),
        "abort_busy_group",
        pytest.param("abort_busy_backend", marks=full),
        pytest.param("abort_all_groups", marks=full),
    ],
)
def test_a_group_that_the_program_aborts_is_not_reported(lab, case):
    job = run_case(lab, case)
    assert set(job.result.statuses.values()) == {0}, job.said
    assert job.said.count("survived") == 4, job.said
    assert "is lost" not in "".join(job.result.outputs.values()), job.said


def test_a_lost_rank_is_reported_before_torch_aborts_the_process(lab):
    environment = {}
    if HAS_ABORT_HOOKS:
        # torch then aborts the process as soon as the abort hooks return, so a poll would be too late.
        environment["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "0"
    job = run_case(lab, "lose_a_rank", **environment)
    output = "".join(job.result.outputs.values())
    assert "is lost: NCCL's COMM_ERROR in the group of ranks 0, 1, 2, 3" in output, output
    assert "torchfrtrace --allow-incomplete-ranks" in output, output


def test_the_flight_recorder_shows_which_collectives_differ(lab, tmp_path):
    """The flight recorder's files, which holmes names, show the mismatch to torchfrtrace."""
    dump_path = tmp_path / "trace_"  # torch appends the rank
    environment = {
        "PYTEST_CURRENT_TEST": "",
        "TIMEOUT_S": "12",
        "TORCH_FR_DUMP_TEMP_FILE": str(dump_path),
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "3000",
    }
    command = [
        sys.executable,
        SCRIPT,
        "call_different_operations",
        "--holmes",
        "--holmes-cluster",
        str(lab.file),
    ]
    # lab.run() would detect the deadlock and end the job before the collectives time out.
    job = lab.lab.start(
        command, order=["a0", "b0"], processes=2, env=environment, gpus=lab.gpus, grace=60
    )
    output = "".join(job.wait().outputs.values())
    assert f"torch writes the last operations of rank 3 to {dump_path}3" in output, output
    assert "--prefix trace_ FOLDER" in output, output

    torchfrtrace = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
    arguments = ["--allow-incomplete-ranks", "--prefix", "trace_", str(tmp_path)]
    report = subprocess.run([*torchfrtrace, *arguments], text=True, capture_output=True)
    assert "COLLECTIVE_TYPE_MISMATCH" in report.stdout + report.stderr, report
