"""Tests the goal gpu-next of the Makefile: one test file of each engine runs over NCCL on a newer torch."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ENGINES = {
    "DDP": "tests/patches/torch/test_ddp.py",
    "FSDP2": "integration_tests/stacks/test_fsdp2.py",
    "DeepSpeed's pipeline": "integration_tests/deepspeed/test_two_clusters.py",
    "ZeRO": "integration_tests/deepspeed/test_zero.py",
    "megatron-core": "integration_tests/megatron/test_core.py",
    "torch's pipelining": "integration_tests/stacks/test_pipelining.py",
}


def commands_of(*arguments: str) -> str:
    """Return the commands that make would run, as text."""
    command = ["make", "--no-print-directory", "-C", str(ROOT), "--dry-run", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("engine", ENGINES)
def test_gpu_next_runs_a_test_file_of_each_engine(engine):
    assert (ROOT / ENGINES[engine]).is_file()
    pytest_command = commands_of("gpu-next", "GPU_NEXT=/elsewhere").splitlines()[-1]
    assert "/elsewhere/bin/python -m pytest" in pytest_command
    assert ENGINES[engine] in pytest_command.split()


def test_a_named_environment_is_not_installed():
    """GPU_NEXT names an environment that exists. Without it, make installs one for the version of torch."""
    assert "pip install -qq" not in commands_of("gpu-next", "GPU_NEXT=/elsewhere")
    installs = commands_of("gpu-next", "NEXT_TORCH=2.99.0")
    assert "python3 -m venv .venv-gpu299" in installs
    assert "torch==2.99.0" in installs


def test_the_torch_that_was_asked_for_is_kept():
    """The frameworks bring no torch of their own, and nothing is installed with dependencies after torch."""
    lines = commands_of("gpu-next", "NEXT_TORCH=2.99.0").splitlines()
    (torch,) = [number for number, line in enumerate(lines) if "torch==2.99.0" in line]
    installs = [number for number, line in enumerate(lines) if "pip install" in line]
    assert torch in installs
    assert all("--no-deps" in lines[number] for number in installs if number != torch)


def test_nightly_includes_gpu_next():
    lines = (ROOT / "Makefile").read_text().splitlines()
    (nightly,) = [line for line in lines if line.startswith("NIGHTLY :=")]
    assert "gpu-next" in nightly.split()
