"""Tests labs of one process that fork their ranks from one preloaded Python (process/templates.py)."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from holmes_lab import Lab
from holmes_lab.process.templates import Templates

from holmes_ext.errors import HolmesError
from integration_tests.lab.processes import PATIENCE, SPEC, eventually, marked

SCRIPT = "import os, time\nprint(os.environ['HOLMES_LAB_NODE'], os.getpid(), flush=True)\n"
WAIT = SCRIPT + "time.sleep(600)\n"


@pytest.fixture
def templates(monkeypatch):
    with Templates() as templates:
        monkeypatch.setattr(Lab, "templates", templates)
        yield templates


def template_pids(templates):
    return [template.process.pid for template in templates._templates.values()]


def descendants(pid):
    """Return the pids of all children of a process, and of their children, and so on."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    pids = [int(child) for child in children]
    for child in children:
        pids += descendants(child)
    return pids


def check_one_lab(templates, script):
    """Run a job in a new lab, and return the pid of its template."""
    lines = []
    with Lab(SPEC) as lab:
        job = lab.start(
            [sys.executable, str(script)],
            preload=("decimal",),
            on_line=lambda *line: lines.append(line),
        )
        eventually(lambda: len(lines) == 3, "three ranks print a line")
        assert {line.split()[0] for _, line, _ in lines} == {"a0", "a1", "b0"}
        # All are in the lab's PID namespace.
        namespaces = {os.readlink(f"/proc/{pid}/ns/pid") for pid in job.pids.values()}
        assert namespaces == {os.readlink(f"/proc/{lab.holder('a0')}/ns/pid")}
        (template,) = template_pids(templates)
        assert set(job.pids.values()) < set(descendants(template))
    assert not any(Path(f"/proc/{pid}").exists() for pid in job.pids.values())
    eventually(lambda: not descendants(template), "the guard ends after the fork server")
    return template


def test_labs_share_a_template_and_leave_nothing_in_it(templates, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WAIT)
    first = check_one_lab(templates, script)
    assert check_one_lab(templates, script) == first
    templates.close()
    assert not Path(f"/proc/{first}").exists()


def test_two_labs_at_once_and_one_that_ends_leaves_the_other_alone(templates, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)]
    with Lab(SPEC) as first:
        assert first.run(command, preload=("decimal",)).returncode == 0
        with Lab(SPEC) as second:
            assert second.run(command, preload=("decimal",)).returncode == 0
        assert first.run(command, preload=("decimal",)).returncode == 0


def test_a_module_that_cannot_be_imported_is_named(templates):
    with Lab(SPEC) as lab:
        with pytest.raises(HolmesError, match="no_such_module"):
            lab.run([sys.executable, "x.py"], preload=("no_such_module",))
        assert not template_pids(templates)


def test_a_killed_template_is_replaced(templates, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for _ in range(3):
        with Lab(SPEC) as lab:
            assert lab.run([sys.executable, str(script)], preload=("decimal",)).returncode == 0
            for pid in template_pids(templates):
                os.kill(pid, signal.SIGKILL)
                eventually(
                    lambda pid=pid: Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z",
                    "it ends",
                )


@pytest.mark.parametrize("victim", ["owner", "keeper"])
def test_whoever_is_killed_nothing_is_left(victim, tmp_path):
    marker = f"template-{victim}-{os.getpid()}"
    (tmp_path / "script.py").write_text(WAIT)
    (tmp_path / "owner.py").write_text("""
import sys
from holmes_lab import Lab
from holmes_lab.process.templates import Templates
from integration_tests.lab.processes import SPEC
with Templates() as Lab.templates, Lab(SPEC) as lab:
    job = lab.start([sys.executable, *sys.argv[1:]], preload=("decimal",))
    (template,) = Lab.templates._templates.values()
    print(lab._keeper.pid, template.process.pid, *job.pids.values(), flush=True)
    job.wait()
""")
    command = [sys.executable, tmp_path / "owner.py", tmp_path / "script.py", marker]
    root = Path(__file__).parents[2]
    path = os.pathsep.join(map(str, (root, root / "lab", root / "tests")))
    owner = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 5, owner.stderr.read()
    os.kill(owner.pid if victim == "owner" else pids[0], signal.SIGKILL)
    owner.communicate(timeout=PATIENCE)
    eventually(
        lambda: not marked(marker) and not any(Path(f"/proc/{pid}").exists() for pid in pids),
        "the kernel ends every process, and the template ends after its guards",
    )


def test_skipping_the_teardown_keeps_status_output_and_exit_functions(lab, tmp_path):
    (tmp_path / "script.py").write_text("""
import atexit, sys, threading, time
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
atexit.register(print, "atexit")
if sys.argv[1] == "raise":
    raise ValueError("a message")
codes = {"none": None, "text": "a message", "3": 3, "0": 0}
sys.exit(codes[sys.argv[1]])
""")
    for argument, status, error in (
        ("3", 3, ""),
        ("0", 0, ""),
        ("text", 1, "a message"),
        ("none", 0, ""),
        ("raise", 1, "ValueError: a message"),
    ):
        for skip in "01":
            command = [sys.executable, str(tmp_path / "script.py"), argument]
            result = lab.run(
                command,
                order=["a0"],
                preload=("decimal",),
                timeout=PATIENCE,
                env={"HOLMES_LAB_SKIP_TEARDOWN": skip},
            )
            assert result.returncode == status, (argument, skip)
            assert result.stdout[0] == "thread\natexit\n", (argument, skip)
            assert error in result.outputs[0]
            assert ("Traceback" in result.outputs[0]) == (argument == "raise")


def test_without_teardown_a_rank_s_modules_are_not_destroyed(lab, tmp_path):
    code = "class Ends:\n    def __del__(self):\n        print('end')\nend = Ends()\n"
    (tmp_path / "script.py").write_text(code)
    command = [sys.executable, str(tmp_path / "script.py")]
    ran = [
        lab.run(command, order=["a0"], preload=("decimal",), env={"HOLMES_LAB_SKIP_TEARDOWN": skip})
        for skip in "01"
    ]
    assert [result.stdout[0] for result in ran] == ["end\n", ""]
