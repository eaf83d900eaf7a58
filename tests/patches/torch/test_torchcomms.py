"""Tests that a job which uses torchcomms ends with one line and status 2, before the first process group.

torchcomms cannot be installed from PyPI. The tests have a stand-in with the names that torch imports.
"""

import os
import subprocess
import sys

import pytest

TORCHCOMMS = {
    "__init__.py": "def new_comm(*arguments, **options): raise SystemExit('torchcomms is used')\n"
    "def is_backend_built(backend): return True\n",
    "_comms.py": "class _BackendWrapper: pass\ndef _is_backend_registered(backend): return False\n",
    "hooks.py": "class FlightRecorderHook: pass\n",
}
SCRIPT = """
import sys, torch.distributed as dist
if "config" in sys.argv:
    dist.config.use_torchcomms = True
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
print("trained over", type(dist.group.WORLD._get_backend(__import__("torch").device("cpu"))).__name__)
dist.destroy_process_group()
"""


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a script of one rank, with flags of holmes, and returns its end."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def run(*flags, installed=True, **environment):
        if installed:
            folder = tmp_path / "torchcomms"
            folder.mkdir()
            for name, text in TORCHCOMMS.items():
                (folder / name).write_text(text)
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", **environment}
        command = [sys.executable, str(script), *flags]
        return subprocess.run(command, env=environment, text=True, timeout=300, capture_output=True)

    return run


@pytest.mark.parametrize("flags, environment, switch", [
    ((), {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"}, "TORCH_DISTRIBUTED_USE_TORCHCOMMS=1"),
    (("config",), {}, "torch.distributed.config.use_torchcomms"),
])  # fmt: skip
def test_one_line_and_status_2(run, flags, environment, switch):
    ended = run("--holmes", *flags, **environment)
    assert ended.returncode == 2 and not ended.stdout and "Traceback" not in ended.stderr, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if switch in line]
    assert line == (
        f"holmes: {switch}: torchcomms ignores the network that holmes gives to each group; unset it, or run "
        "without --holmes"
    )


def test_torch_uses_torchcomms_without_holmes(run):
    """The variable and the stand-in do what they do for a user."""
    ended = run(TORCH_DISTRIBUTED_USE_TORCHCOMMS="1")
    assert ended.returncode == 1 and "torchcomms is used" in ended.stderr, ended.stderr


def test_the_variable_alone_does_nothing(run):
    """torch uses its own backends if torchcomms is not installed, so holmes loses nothing."""
    ended = run("--holmes", installed=False, TORCH_DISTRIBUTED_USE_TORCHCOMMS="1")
    assert ended.returncode == 0 and "trained over ProcessGroupGloo" in ended.stdout, ended.stderr
