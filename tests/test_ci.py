""".ci/run where apt brings a browser, and where it cannot: the run goes on, and says so in one line."""

import shutil
import subprocess

import pytest
from test_docs import ROOT

TOOLS, THERE = ("bash", "dirname", "mkdir", "tail", "timeout"), ("git", "python3", "tc", "ip", "unshare")
LAUNCHERS = ("slurmctld", "slurmd", "munged", "mpirun", "pdsh", "ssh", "sshd")
SAID = ".ci/run: apt brought no chromium-headless-shell: the browser tests are skipped; E: Unable to locate package"


def program(path, text):
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("apt, said", [("exit 0", []), ("echo 'E: Unable to locate package' >&2; exit 100", [SAID])])
def test_a_browser_that_apt_cannot_bring_is_told(tmp_path, apt, said):
    """Stand-ins for make, apt and .venv's python; no browser on PATH."""
    programs, own = tmp_path / "bin", tmp_path / ".ci" / "run"
    for folder in (programs, own.parent, tmp_path / ".venv" / "bin"):
        folder.mkdir(parents=True)
    for tool in TOOLS:
        (programs / tool).symlink_to(shutil.which(tool))
    for tool in (*THERE, *LAUNCHERS):
        program(programs / tool, "exit 0")
    program(programs / "apt-get", f'echo "$1" >> asked; [ "$1" = update ] && exit 0; {apt}')
    program(programs / "make", 'echo "make $1"')
    program(tmp_path / ".venv" / "bin" / "python", 'echo "python $1"')
    shutil.copy(ROOT / ".ci" / "run", own)
    done = subprocess.run([own], env={"PATH": str(programs)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["make check", *said, "make test", "python benchmarks/matrix.py"]
    assert (tmp_path / "asked").read_text().split() == ["update", "install"]
