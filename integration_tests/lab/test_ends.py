"""Tests that a lab leaves nothing behind, however it ends.

Further tests are about exit statuses, missing tools and users other than root.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from holmes_lab import Lab, state

from holmes_ext.errors import HolmesError
from integration_tests.lab.processes import PATIENCE, SPEC, TOML, cli, eventually, marked, python


def test_everything_is_gone_after_close():
    with Lab(SPEC) as lab:
        directory = lab.directory
        holder = lab.holder("a0")
        assert Path(f"/proc/{holder}/ns/net").exists()
        job = lab.start(python("import time; time.sleep(600)"))
        pids = job.pids
    assert not directory.exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in [holder, *pids.values()])


@pytest.mark.parametrize("preload", [[], ["--preload", "json"]])
def test_sigkill_of_the_lab_leaves_nothing(toml, tmp_path, preload):
    marker = f"killed-{os.getpid()}-{len(preload)}"
    (tmp_path / "s.py").write_text("import time; print('up', flush=True); time.sleep(600)")
    command = [sys.executable, str(tmp_path / "s.py"), marker]
    process = cli("run", "--cluster", "FILE", *preload, "--", *command, toml=toml)
    assert process.stdout.readline().endswith("up\n")
    (directory,) = (path for path in state.directories() if f"-{process.pid}-" in path.name)
    keeper = json.loads((directory / "state.json").read_text())["keeper"][0]
    process.kill()
    process.wait()
    eventually(
        lambda: not marked(marker) and not Path(f"/proc/{keeper}").exists(),
        "the kernel ends every process",
    )
    eventually(lambda: not directory.exists(), "the keeper removes the files")


def test_a_caller_that_is_killed_while_its_lab_starts_leaves_nothing(toml, tmp_path):
    """The caller is killed before the keeper process has reported that it runs."""
    (tmp_path / "s.py").write_text("""
import os, sys
from holmes_ext.cluster.spec import load_spec
from holmes_lab import Lab
from holmes_lab.process.keeper_process import KeeperProcess
KeeperProcess._answer = lambda self: (print(self.directory, flush=True), os.kill(os.getpid(), 9))
with Lab(load_spec(sys.argv[1])):
    pass
""")
    killed = subprocess.run(
        [sys.executable, tmp_path / "s.py", toml], capture_output=True, text=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    directory = Path(killed.stdout.strip())
    assert directory.name.startswith("holmes-lab-")
    eventually(lambda: not directory.exists(), "the keeper removes the files")


def test_ctrl_c_ends_all_and_exits_130(toml):
    marker = f"interrupted-{os.getpid()}"
    process = cli(
        "run",
        "--cluster",
        "FILE",
        "--",
        *python("import time; print('up', flush=True); time.sleep(600)", marker),
        toml=toml,
    )
    assert process.stdout.readline().endswith("up\n")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and "Traceback" not in errors
    assert marked(marker) == []
    assert not any(f"-{process.pid}-" in path.name for path in state.directories())


def test_down_ends_an_orphaned_lab_and_leaves_one_in_use_alone(lab, toml):
    marker = f"orphan-{os.getpid()}"
    process = cli(
        "run",
        "--cluster",
        "FILE",
        "--",
        *python("import time; print('up', flush=True); time.sleep(600)", marker),
        toml=toml,
    )
    assert process.stdout.readline().endswith("up\n")
    (directory,) = (path for path in state.directories() if f"-{process.pid}-" in path.name)
    keeper = json.loads((directory / "state.json").read_text())["keeper"][0]
    os.kill(keeper, signal.SIGSTOP)  # it cannot see that its caller dies
    process.kill()
    process.wait()
    holders = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    # The network still exists: three nodes and the switch.
    assert len(holders) >= 4 and directory.exists()
    down = cli("down", "--json", toml=toml)
    out, errors = down.communicate(timeout=PATIENCE)
    assert down.returncode == 0, errors
    entry_of = {entry["directory"]: entry for entry in json.loads(out)}
    orphaned = entry_of[str(directory)]
    assert orphaned["cleared"] and orphaned["keeper_alive"]
    assert not entry_of[str(lab.directory)]["cleared"]
    eventually(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in holders),
        "the kernel ends every process",
    )
    assert not marked(marker) and not directory.exists() and lab.run(["true"]).returncode == 0


def test_a_killed_keeper_is_an_error_and_not_a_hang():
    with Lab(SPEC) as lab:
        job = lab.start(python("import time; time.sleep(600)"))
        assert job.pids
        os.kill(lab._keeper.pid, signal.SIGKILL)
        with pytest.raises(HolmesError, match="keeper"):
            job.wait(PATIENCE)
        with pytest.raises(HolmesError, match="keeper"):
            lab.run(["true"])


def test_cli_prefixes_lines_and_passes_the_status_on(toml):
    process = cli(
        "run",
        "--cluster",
        "FILE",
        "--interleave",
        "--env",
        "X=7",
        "--",
        "bash",
        "-c",
        "echo $X; exit $RANK",
        toml=toml,
    )
    out, errors = process.communicate(timeout=PATIENCE)
    assert sorted(out.splitlines()) == ["[a0:0] 7", "[a1:0] 7", "[b0:0] 7"]
    assert process.returncode in (1, 2) and "failed first" in errors


def test_a_missing_tool_is_named(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    with pytest.raises(HolmesError, match="`ip`.*iproute2"):
        Lab(SPEC)


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become nobody")


BECOME_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


def nobodys_python():
    """Return a Python of this version that the user nobody may execute, or skip the test.

    A virtual environment may be in /root, which other users cannot read.
    """
    code = "import sys; print(*sys.version_info[:2])"
    for interpreter in (sys.executable, "/usr/bin/python3"):
        command = [*BECOME_NOBODY, "env", "-i", interpreter, "-I", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/")
        executable = subprocess.run([*BECOME_NOBODY, "test", "-x", interpreter]).returncode == 0
        if executable and done.stdout.split() == [str(number) for number in sys.version_info[:2]]:
            return interpreter
    pytest.skip(
        f"the user nobody may not execute {sys.executable}, and /usr/bin/python3 is another version"
    )


def as_nobody(code, *wrapper, **env):
    """Run Python code as the user nobody, and return the finished process.

    Args:
        wrapper: A command that runs the command behind it.
        env: Further environment variables.
    """
    root = str(Path(sys.modules["holmes_ext"].__file__).parents[1])
    packages = os.pathsep.join(
        [root, f"{root}/lab", *(path for path in sys.path if path.endswith("-packages"))]
    )
    python_of_nobody = nobodys_python()
    environment = {**os.environ, "PYTHONPATH": packages, "HOME": "/", **env}
    imports = subprocess.run(
        [*BECOME_NOBODY, python_of_nobody, "-c", "import holmes_ext, wrapt"],
        env=environment,
        cwd="/",
        capture_output=True,
    )
    if imports.returncode:
        pytest.skip(f"the user nobody may not read {root}, or the packages installed beside it")
    return subprocess.run(
        [*BECOME_NOBODY, *wrapper, python_of_nobody, "-c", code],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
    )


NOBODY = f"""
from holmes_ext.cluster.spec import parse_spec
from holmes_ext.errors import HolmesError
from holmes_lab import Lab
try:
    with Lab(parse_spec({TOML!r})) as lab:
        result = lab.run(["bash", "-c", "hostname; cat /sys/class/net/eth0/carrier"])
        nics = sorted(lab.counters()["b0"])
        print(result.returncode, result.outputs[2].split(), nics, lab.directory.exists())
    print(lab.directory.exists())
except HolmesError as error:
    print("HolmesError:", error)
"""


@needs_root
def test_an_ordinary_user_gets_a_user_namespace():
    done = as_nobody(NOBODY)
    if "HolmesError" in done.stdout:
        pytest.skip(done.stdout)
    assert done.stdout.splitlines() == ["0 ['b0', '1'] ['eth0', 'roce0'] True", "False"], (
        done.stderr
    )


@needs_root
def test_without_any_right_one_line_says_what_is_missing():
    forbid = (
        "echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-all "
        '--inh-caps=-all "$@"'
    )
    done = as_nobody(NOBODY, "unshare", "-Ur", "bash", "-c", forbid, "bash")
    if "unshare" in done.stderr:
        pytest.skip(done.stderr)
    assert "HolmesError: the lab needs root, or user namespaces" in done.stdout
    assert "user.max_user_namespaces=0 forbids" in done.stdout
    assert "Traceback" not in done.stderr
