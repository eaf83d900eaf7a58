""".ci/run where apt brings a browser and the launchers, and where it cannot: the run goes on, and says so in a line."""

import shutil
import subprocess

import pytest
from test_docs import ROOT

TOOLS = ("bash", "chmod", "dirname", "mkdir", "rm", "tail", "timeout", "touch")
THERE = ("git", "python3", "tc", "ip", "unshare")
LAUNCHERS = ("slurmctld", "slurmd", "munged", "mpirun", "pdsh", "ssh", "sshd")
WHY = "; E: Unable to locate package"
BROWSER = f".ci/run: apt brought no chromium-headless-shell: the browser tests are skipped{WHY}"
SLURM = f".ci/run: apt brought no slurm-wlm munge: the tests of real launchers are skipped{WHY}"
FAILS = "echo 'E: Unable to locate package' >&2; exit 100"


def program(path, text):
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("apt, there, said, asked", [
    ("exit 0", LAUNCHERS, [], 1),
    (FAILS, LAUNCHERS, [BROWSER], 1),
    (FAILS, [name for name in LAUNCHERS if name not in ("slurmctld", "slurmd", "munged")], [SLURM, BROWSER], 2),
    (f'[[ "$*" != *slurm* ]] || {{ {FAILS}; }}', [LAUNCHERS[1], *LAUNCHERS[3:]], [SLURM], 2),
])
def test_what_apt_cannot_bring_is_told(tmp_path, apt, there, said, asked):
    """Stand-ins for make, apt and .venv's python; no browser on PATH, and not all of the launchers."""
    programs, own = tmp_path / "bin", tmp_path / ".ci" / "run"
    for folder in (programs, own.parent, tmp_path / ".venv" / "bin"):
        folder.mkdir(parents=True)
    for tool in TOOLS:
        (programs / tool).symlink_to(shutil.which(tool))
    for tool in (*THERE, *there):
        program(programs / tool, "exit 0")
    program(programs / "apt-get", f'echo "$1" >> asked; [ "$1" = update ] && exit 0; {apt}')
    program(programs / "make", 'echo "make $1"')
    program(tmp_path / ".venv" / "bin" / "python", 'echo "python $1"')
    text = (ROOT / ".ci" / "run").read_text()
    assert "PATH=$PATH:/usr/sbin:/sbin\n" in text  # this machine's own launchers lie there
    program(own, text.replace("PATH=$PATH:/usr/sbin:/sbin\n", "").replace("/usr/sbin/policy-rc.d", "policy-rc.d"))
    done = subprocess.run([own], env={"PATH": str(programs)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["make check", *said, "make test", "python benchmarks/matrix.py"]
    assert (tmp_path / "asked").read_text().split() == ["update", "install"] * asked
