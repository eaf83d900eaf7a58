"""Tests that a job which uses torchcomms ends with a message and status 2, before it makes a process group.

torchcomms cannot be installed from PyPI. So the tests use a stand-in, a package with the names that torch
imports.
"""

import os
import subprocess
import sys

import pytest

#: Files of the stand-in for the package torchcomms. The process exits if torch uses the stand-in.
TORCHCOMMS = {
    "__init__.py": "def new_comm(*arguments, **options): raise SystemExit('torchcomms is used')\n"
    "def is_backend_built(backend): return True\n",
    "_comms.py": "class _BackendWrapper: pass\ndef _is_backend_registered(backend): return False\n",
    "hooks.py": "class FlightRecorderHook: pass\n",
}
#: Training script of one rank. With the argument "config", the script itself switches torchcomms on.
SCRIPT = """
import sys, torch.distributed as dist
if "config" in sys.argv:
    dist.config.use_torchcomms = True
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
print("trained over", type(dist.group.WORLD._get_backend(__import__("torch").device("cpu"))).__name__)
dist.destroy_process_group()
"""
#: Environment variable that switches torchcomms on.
SWITCH = "TORCH_DISTRIBUTED_USE_TORCHCOMMS"


@pytest.fixture
def run_script(tmp_path):
    """Return a function that runs SCRIPT in a new process and returns the subprocess.CompletedProcess.

    It takes the script's arguments, whether the stand-in for torchcomms is installed, and environment
    variables.
    """
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def run_script(*arguments, is_installed=True, **variables):
        if is_installed:
            folder = tmp_path / "torchcomms"
            folder.mkdir()
            for name, text in TORCHCOMMS.items():
                (folder / name).write_text(text)
        environment = {
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        command = [sys.executable, str(script), *arguments]
        return subprocess.run(command, env=environment, text=True, timeout=300, capture_output=True)

    return run_script


@pytest.mark.parametrize(
    "arguments, variables, named_switch",
    [
        ([], {SWITCH: "1"}, f"{SWITCH}=1"),
        (["config"], {}, "torch.distributed.config.use_torchcomms"),
    ],
)
def test_the_job_ends_with_one_message_and_status_2(run_script, arguments, variables, named_switch):
    """The message names the switch by which torchcomms is on: an environment variable, or torch's config."""
    process = run_script("--holmes", *arguments, **variables)
    assert process.returncode == 2, process.stderr
    assert process.stdout == "" and "Traceback" not in process.stderr, process.stderr
    (line,) = [line for line in process.stderr.splitlines() if named_switch in line]
    assert line == (
        f"holmes: {named_switch}: torchcomms ignores the network that holmes gives to each group; unset it, "
        "or run without --holmes"
    )


def test_torch_uses_torchcomms_without_holmes(run_script):
    """The environment variable and the stand-in have the effect that the other tests rely on."""
    process = run_script(**{SWITCH: "1"})
    assert process.returncode == 1 and "torchcomms is used" in process.stderr, process.stderr


def test_the_job_runs_if_torchcomms_is_not_installed(run_script):
    """Without torchcomms, torch ignores the variable and uses its own backends, which holmes supports."""
    process = run_script("--holmes", is_installed=False, **{SWITCH: "1"})
    assert process.returncode == 0, process.stderr
    assert "trained over ProcessGroupGloo" in process.stdout, process.stderr
