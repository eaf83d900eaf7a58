""".ci/run where apt brings a browser and pip a CUDA build of torch, and where they cannot: the run goes on, and says so
in one line."""

import shutil
import subprocess

import pytest
from test_docs import ROOT

TOOLS = ("bash", "dirname", "mkdir", "nice", "tail", "timeout")
THERE = ("git", "g++", "python3", "tc", "ip", "unshare")
SAID = (".ci/run: apt brought no chromium-headless-shell: the browser tests are skipped;"
        " E: Unable to locate package")

NO_TORCH = (".ci/run: NO EMULATED GPU WAS TESTED (but its runtime, by make test), as pip brought no CUDA build of"
            " torch: ERROR: no matching distribution")


def program(path, text):
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def run(tmp_path):
    """Runs .ci/run with stand-ins for make, apt and .venv's python, and no browser on PATH; what it prints."""
    programs, own = tmp_path / "bin", tmp_path / ".ci" / "run"
    for folder in (programs, own.parent, tmp_path / ".venv" / "bin"):
        folder.mkdir(parents=True)
    for tool in TOOLS:
        (programs / tool).symlink_to(shutil.which(tool))
    for tool in THERE:
        program(programs / tool, "exit 0")
    program(tmp_path / ".venv" / "bin" / "python", 'echo "python $1"')
    shutil.copy(ROOT / ".ci" / "run", own)

    def lines(apt="exit 0", make=""):
        program(programs / "apt-get", f'echo "$1" >> asked; [ "$1" = update ] && exit 0; {apt}')
        program(programs / "make", f'echo "make $1"; {make}')
        done = subprocess.run([own], env={"PATH": str(programs)}, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "asked").read_text().split() == ["update", "install"]
        return done.stdout.splitlines()

    return lines


@pytest.mark.parametrize("apt, said", [("exit 0", []), ("echo 'E: Unable to locate package' >&2; exit 100", [SAID])])
def test_a_browser_that_apt_cannot_bring_is_told(run, tmp_path, apt, said):
    torch = tmp_path / ".venv-gpu" / "lib" / "python3.11" / "site-packages" / "torch" / "version.py"
    torch.parent.mkdir(parents=True)
    torch.write_text("")
    assert run(apt) == ["make check", *said, "make test", "python benchmarks/matrix.py", "make gpu"]


def test_a_torch_that_pip_cannot_bring_is_told(run):
    lines = run(make='[ "$1" != .venv-gpu ] || { echo "ERROR: no matching distribution" >&2; exit 2; }')
    assert lines == ["make check", "make test", "python benchmarks/matrix.py", NO_TORCH]
