"""Tests that the commands of docs/joined.md, in its order, make two jobs train one model.

They run on this machine instead of three hosts. Each host has a state folder of its own, so a job must redeem
its invitation. The jobs are the example for plain torch, with one process and rounds of few steps.
"""

import os
import re
import shlex
import subprocess
import sys

import pytest

from integration_tests.jobs import ROOT

pytest.importorskip("torch")
PAGE = ROOT / "docs" / "joined.md"
SECONDS = 300  # after which a command has failed
#: What the page has -> what runs here; PORT is filled in.
REPLACED = {
    "gate.example.org:29600": "127.0.0.1:PORT",
    "--address gate.example.org": "--address 127.0.0.1 --port PORT",
    "join status": "join status 127.0.0.1:PORT",
    "join serve --outer every=64": "join serve --port 0 --outer every=8,fragments=2,delay=2,min=2",
    "torchrun --nproc-per-node 8 train.py": (
        f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 1 "
        f"{ROOT}/examples/plain_torch/train.py --steps 24"
    ),
}


def commands_of_page() -> list[str]:
    """Return the commands below "Start the jobs", without those of pip."""
    section = re.search(r"## Start the jobs\n(.*?)\n## ", PAGE.read_text(), re.DOTALL)[1]
    lines = re.findall(r"^    (\S.*)$", section, re.MULTILINE)
    return [line for line in lines if not line.startswith("pip ")]


def start(command: str, port: str, host: str, folder) -> subprocess.Popen:
    """Start a command of the page on one of its hosts, which is a state folder here."""
    for shown, here in REPLACED.items():
        command = command.replace(shown, here.replace("PORT", port))
    words = shlex.split(command)
    if words[0] == "holmes":
        words[:1] = [sys.executable, "-m", "holmes_ext.cli.main"]
    environ = {**os.environ, "XDG_STATE_HOME": str(folder / host), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words,
        cwd=folder,
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def ended(process: subprocess.Popen) -> str:
    """Return what a command has printed, after it has succeeded."""
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output
    return output


def test_the_commands_of_the_page_make_two_jobs_train_one_model(tmp_path):
    serve, invite_east, invite_west, *jobs, status = commands_of_page()
    assert serve.startswith("holmes join serve") and status.startswith("holmes join status")
    coordinator = start(serve, "", "gate", tmp_path)
    running = []
    try:
        port = re.search(r"at port (\d+)", coordinator.stdout.readline())[1]
        for command in (invite_east, invite_west):
            assert "--holmes-join-invitation" in ended(start(command, port, "gate", tmp_path))
        running = [
            start(command, port, name, tmp_path)
            for command, name in zip(jobs, ("east", "west"), strict=True)
        ]
        outputs = [ended(process) for process in running]
        shown, _ = start(status, port, "gate", tmp_path).communicate(timeout=SECONDS)
    finally:
        for process in (coordinator, *running):
            process.terminate()
        log, _ = coordinator.communicate(timeout=SECONDS)
    for name, output in zip(("east", "west"), outputs):
        assert f"holmes: job {name} is in the run" in output
        assert "step 24: loss" in output
        assert f"job {name} has got its certificate" in log
        assert re.search(rf"^{name} +gone", shown, re.MULTILINE), shown
    assert re.search(r"round \d+: commit \((east|west) 0\.\d+, (east|west) 0\.\d+\)", log)
