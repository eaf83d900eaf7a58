"""Tests .ci/run, the script of a CI run: it installs what the tests need, and starts them with make.

If apt, pip or git cannot install something, the run must go on and print one line that says which tests are
skipped. The tests run the script in a temporary folder with fake programs:

    apt-get        succeeds or fails, as the test says
    make           prints its target; fails for a target that the test chooses
    launchers      srun, mpirun, ...: present or missing on PATH
"""

import shutil
import subprocess

import pytest
from test_docs import ROOT

TOOLS = (
    "bash",
    "cat",
    "chmod",
    "dirname",
    "grep",
    "mkdir",
    "rm",
    "sleep",
    "tail",
    "timeout",
    "touch",
)
THERE = ("git", "g++", "python3", "tc", "ip", "unshare")
LAUNCHERS = ("slurmctld", "slurmd", "munged", "mpirun", "pdsh", "ssh", "sshd")
WHY = "; E: Unable to locate package"
BROWSER = f".ci/run: apt brought no chromium-headless-shell: the browser tests are skipped{WHY}"
SLURM = f".ci/run: apt brought no slurm-wlm munge: the tests of real launchers are skipped{WHY}"
INSTALL = ("make .venv", "make check", "make docs")
END = ("make test", "make unit", "make gpu", "make summary")
FAILS = "echo 'E: Unable to locate package' >&2; exit 100"
NO_TORCH = (
    ".ci/run: NO EMULATED GPU WAS TESTED (but its runtime, by make unit), as pip brought no CUDA build of"
    " torch: ERROR: no matching distribution"
)


def program(path, text):
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def bring_torch(folder):
    """Create the file by which .ci/run sees that the CUDA build of torch is installed."""
    torch = folder / ".venv-gpu" / "lib" / "python3.11" / "site-packages" / "torch" / "version.py"
    torch.parent.mkdir(parents=True)
    torch.write_text("")


@pytest.fixture
def run(tmp_path):
    """Return a function that runs .ci/run with fake programs and returns the lines that it prints.

    The function's parameters: `apt` and `make` are bash commands that the fake apt-get and make execute;
    `there` are the launchers on PATH; `status` is the exit status that .ci/run must have. No browser is
    installed.
    """
    programs, script = tmp_path / "bin", tmp_path / ".ci" / "run"
    for folder in (programs, script.parent):
        folder.mkdir(parents=True)
    for tool in TOOLS:  # the real ones: bash, grep, ...
        (programs / tool).symlink_to(shutil.which(tool))
    for tool in THERE:  # fake ones that do nothing: git, g++, ...
        program(programs / tool, "exit 0")
    text = (ROOT / ".ci" / "run").read_text()
    # The script adds folders to PATH in which this machine's own launchers are. The copy must not.
    assert "PATH=$PATH:/usr/sbin:/sbin\n" in text
    text = text.replace("PATH=$PATH:/usr/sbin:/sbin\n", "")
    text = text.replace("/usr/sbin/policy-rc.d", "policy-rc.d")  # a file that the script writes
    program(script, text)

    def run_script(apt="exit 0", there=LAUNCHERS, make="", status=0):
        for tool in there:
            program(programs / tool, "exit 0")
        # apt-get appends its subcommand, update or install, to the file `asked`. It executes `apt` only for
        # install.
        program(programs / "apt-get", f'echo "$1" >> asked; [ "$1" = update ] && exit 0; {apt}')
        program(programs / "make", f'echo "make $1"; {make}')
        result = subprocess.run(
            [script], env={"PATH": str(programs)}, capture_output=True, text=True, timeout=60
        )
        assert result.returncode == status, result.stderr
        return result.stdout.splitlines()

    return run_script


@pytest.mark.parametrize(
    "apt, there, said, asked",
    [
        ("exit 0", LAUNCHERS, [], 1),
        (FAILS, LAUNCHERS, [BROWSER], 1),
        (
            FAILS,
            [name for name in LAUNCHERS if name not in ("slurmctld", "slurmd", "munged")],
            [SLURM, BROWSER],
            2,
        ),
        (f'[[ "$*" != *slurm* ]] || {{ {FAILS}; }}', [LAUNCHERS[1], *LAUNCHERS[3:]], [SLURM], 2),
    ],
)
def test_what_apt_cannot_bring_is_told(run, tmp_path, apt, there, said, asked):
    bring_torch(tmp_path)
    assert run(apt, there) == [*INSTALL, *said, *END]
    assert (tmp_path / "asked").read_text().split() == ["update", "install"] * asked


def test_a_torch_that_pip_cannot_bring_is_told(run):
    lines = run(
        make='[ "$1" != .venv-gpu ] || { echo "ERROR: no matching distribution" >&2; exit 2; }'
    )
    assert lines == [*INSTALL, "make test", "make unit", NO_TORCH, "make summary"]


def test_a_checkout_that_git_cannot_bring_is_told(run, tmp_path):
    bring_torch(tmp_path)
    line = "Megatron-LM: MISSING (Could not resolve host): put a checkout into /cache"
    lines = run(make=f'[ "$1" != checkouts ] || {{ echo "{line}"; echo "NCCL: found"; exit 2; }}')
    assert lines == [*INSTALL, line, *END]


def test_emulated_gpus_are_built_from_the_nccl_that_was_cloned(run, tmp_path):
    bring_torch(tmp_path)
    run(make='echo "$1" >>order; [ "$1" != checkouts ] || { sleep 1; echo cloned >>order; }')
    order = (tmp_path / "order").read_text().splitlines()
    assert order.index(".venv-gpu") < order.index("cloned") < order.index("gpu-libraries")


@pytest.mark.parametrize("room", ["docs", "unit", "test", "gpu"])
def test_a_room_that_fails_fails_all_and_ends_no_other(run, tmp_path, room):
    bring_torch(tmp_path)
    lines = run(make=f'[ "$1" != {room} ] || exit 2', status=2)
    assert lines.count("make docs") == (2 if room == "docs" else 1)
    assert lines[-4:] == [*END]
