"""Switching on: what decide() says, and what really happens in an environment where the wheel is installed.

holmes_ext.job is replaced there by one that writes down each activation, so no torch is needed.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import venvs

from holmes_ext import _pth

WORKER = {"RANK": "1", "WORLD_SIZE": "2"}
SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}

RECORDING_SWITCH = """
import json, os, sys
def activate(argv):
    with open(os.environ["RECORD"], "a") as record:
        print(json.dumps({"pid": os.getpid(), "argv": list(argv), "path0": sys.path[0]}), file=record)
    if "--holmes-bad" in argv:
        print("holmes: bad", file=sys.stderr)
        raise SystemExit(2)
    argv[:] = [a for a in argv if not a.startswith("--holmes")]
"""
SHOW = "import sys, json; print(json.dumps([__name__, sys.argv, sys.path[0], __file__]))"


@pytest.mark.parametrize(
    "kind, program, arguments, environ, expected",
    [
        # a script, by flag
        ("file", "train.py", ["--holmes"], {}, "activate"),
        ("file", "train.py", ["--lr", "1", "--holmes-plan=p.json"], WORKER, "activate"),
        # by rank: the .pth line was reached through HOLMES=1
        ("file", "train.py", ["--holmespun"], WORKER, "activate"),
        ("file", "train.py", ["--holmespun"], {"SLURM_PROCID": "0"}, "leave"),
        ("module", "pkg.train", ["--holmes"], {}, "activate"),
        ("command", "print()", ["--holmes"], {}, "activate"),
        # by the environment
        ("file", "train.py", [], {"HOLMES": "1"}, "activate"),
        ("module", "pkg.train", [], {"HOLMES": "1", **WORKER}, "activate"),
        ("command", "print()", [], {"HOLMES": "1", **WORKER}, "leave"),
        ("stdin", "", [], {"HOLMES": "1"}, "leave"),
        # launchers keep their flags, also when a scheduler started them
        ("file", "/env/bin/torchrun", ["train.py", "--holmes"], SRUN, "leave"),
        (
            "module",
            "torch.distributed.run",
            ["train.py", "--holmes"],
            {"OMPI_COMM_WORLD_RANK": "0"},
            "leave",
        ),
        ("module", "deepspeed.launcher.launch", ["train.py", "--holmes"], {}, "leave"),
        ("file", "/env/lib/torch/distributed/run.py", ["train.py", "--holmes"], SRUN, "leave"),
        (
            "file",
            "/env/bin/holmes",
            ["lab", "run", "--", "python", "train.py", "--holmes"],
            WORKER,
            "leave",
        ),
        ("module", "holmes_ext", ["train.py", "--holmes"], WORKER, "leave"),
        ("module", "pytest", ["-k", "--holmes"], {}, "leave"),
        # an installed command that nobody knows: with a rank it is the training
        # program, without one a launcher
        ("file", "/env/bin/litgpt", ["finetune", "--holmes"], WORKER, "activate"),
        ("file", "/env/bin/submit", ["train.py", "--holmes"], {}, "leave"),
        # Slurm: the batch script's own helpers are no workers, srun's tasks are
        ("file", "prepare.py", [], {"HOLMES": "1", "SLURM_PROCID": "0"}, "leave"),
        ("file", "train.py", [], {"HOLMES": "1", **SRUN}, "activate"),
        # helpers of multiprocessing
        (
            "command",
            "from multiprocessing.spawn import spawn_main; spawn_main()",
            ["--multiprocessing-fork"],
            {"HOLMES": "1", **WORKER},
            "leave",
        ),
        # off
        ("file", "train.py", ["--holmes"], {"HOLMES": "0", **WORKER}, "strip"),
        ("file", "train.py", ["--holmes"], {"HOLMES_DISABLE": "x, all", **WORKER}, "strip"),
        ("file", "train.py", ["--holmes"], {"HOLMES_DISABLE": "x", **WORKER}, "activate"),
        ("file", "train.py", [], {"HOLMES_DISABLE": "all", "HOLMES": "1", **WORKER}, "leave"),
        ("file", "/env/bin/torchrun", ["train.py", "--holmes"], {"HOLMES": "0"}, "leave"),
    ],
)
def test_decide(kind, program, arguments, environ, expected):
    assert _pth.decide(kind, program, arguments, environ, child=False) == expected
    assert _pth.decide(kind, program, arguments, environ, child=True) == "leave"


def test_strip_flags():
    holmes = "--holmes-plan p.json --holmes-overlap=on --holmes-cluster --x"
    argv = f"train.py --holmes --lr 1 {holmes} --y --holmesian".split()
    _pth.strip_flags(argv)
    assert argv == "train.py --lr 1 --y --holmesian".split()


def test_is_child_asks_for_an_ancestor():
    assert _pth.is_child({_pth.MARKER: str(os.getppid())})
    assert not _pth.is_child({_pth.MARKER: str(os.getpid())})
    assert not _pth.is_child({})
    with subprocess.Popen(["sleep", "60"]) as stranger:
        assert not _pth.is_child({_pth.MARKER: str(stranger.pid)})
        stranger.kill()


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Make an environment with holmes_ext's wheel, whose switch is replaced by a recording one."""
    python = venvs.make(tmp_path_factory.mktemp("switch") / "venv", venvs.built().wheel)
    (switch,) = python.parent.parent.glob("lib/*/site-packages/holmes_ext/job.py")
    switch.write_text(RECORDING_SWITCH)
    return python


class Case:
    """A folder with scripts, the environment's python, and the activations that happened."""

    def __init__(self, folder: Path, python: Path):
        self.folder, self.python, self.record = folder, python, folder / "record"

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def run(self, *arguments, expect=0, **environ):
        """Run `python ARGUMENTS`, and return its activations and its output.

        The output is read as JSON (None when there is none).
        """
        self.record.unlink(missing_ok=True)
        result = venvs.run(
            self.python, *arguments, cwd=self.folder, RECORD=str(self.record), **environ
        )
        assert result.returncode == expect, result.stdout + result.stderr
        self.stderr = result.stderr
        records = (
            [json.loads(line) for line in self.record.read_text().splitlines()]
            if self.record.exists()
            else []
        )
        return records, json.loads(result.stdout) if result.stdout.strip() else None


@pytest.fixture
def case(tmp_path, python):
    case = Case(tmp_path, python)
    case.write("jobs/train.py", SHOW)
    case.write("pkg/__init__.py", "")
    case.write("pkg/train.py", SHOW)
    return case


def test_nothing_is_imported_without_the_flag(case):
    result = venvs.run(case.python, "-X", "importtime", "-c", "pass", cwd=case.folder)
    assert (
        "site" in result.stderr and "holmes" not in result.stderr and "torch" not in result.stderr
    )
    result = venvs.run(
        case.python,
        "-X",
        "importtime",
        "-c",
        "pass",
        "--holmes",
        cwd=case.folder,
        RECORD=str(case.record),
    )
    assert "holmes_ext._pth" in result.stderr


@pytest.mark.parametrize("environ", [{}, WORKER])
def test_flag_on_a_script(case, environ):
    records, (name, argv, path0, _) = case.run("jobs/train.py", "--lr", "1", "--holmes", **environ)
    assert [record["argv"] for record in records] == [["jobs/train.py", "--lr", "1", "--holmes"]]
    # sys.path is complete when activate runs
    assert records[0]["path0"] == path0 == str(case.folder / "jobs")
    assert (name, argv) == ("__main__", ["jobs/train.py", "--lr", "1"])


def test_flag_on_a_module_and_on_code(case):
    records, (name, argv, _, file) = case.run("-m", "pkg.train", "--holmes", "x")
    assert len(records) == 1 and name == "__main__" and argv == [file, "x"]
    records, argv = case.run("-c", "import sys, json; print(json.dumps(sys.argv))", "--holmes", "x")
    assert len(records) == 1 and argv == ["-c", "x"]


def test_environment_and_off(case):
    assert len(case.run("jobs/train.py", HOLMES="1", **WORKER)[0]) == 1
    assert case.run("jobs/train.py", HOLMES="yes", **WORKER)[0] == []
    records, (_, argv, _, _) = case.run(
        "jobs/train.py", "--holmes", "--holmes-plan", "p", "x", HOLMES="0", **WORKER
    )
    assert records == [] and argv == ["jobs/train.py", "x"]


@pytest.mark.parametrize(
    "how", [["jobs/train.py"], ["-m", "pkg.train"], ["-m", "holmes_ext", "jobs/train.py"]]
)
def test_bad_input_ends_with_status_2_before_the_script(case, how):
    records, output = case.run(*how, "--holmes", "--holmes-bad", expect=2)
    assert len(records) == 1 and output is None and case.stderr == "holmes: bad\n"


@pytest.mark.parametrize("as_module", [False, True])
def test_a_launcher_is_left_alone_and_its_workers_are_activated(case, as_module):
    launcher = (
        "import os, subprocess, sys\n"
        "workers = [subprocess.Popen([sys.executable, *sys.argv[1:]], stdout=subprocess.DEVNULL,\n"
        "    env={**os.environ, 'RANK': str(r), 'WORLD_SIZE': '2'}) for r in range(2)]\n"
        "assert '--holmes' in sys.argv and all(w.wait() == 0 for w in workers)\n"
        "print([w.pid for w in workers])"
    )
    if as_module:
        for package in ("torch", "torch/distributed"):
            case.write(f"{package}/__init__.py", "")
        case.write("torch/distributed/run.py", launcher)
        how = ["-m", "torch.distributed.run"]
    else:
        how = [case.write("torchrun", launcher)]
    for arguments, argv0 in [
        (["jobs/train.py"], "jobs/train.py"),
        (["-m", "pkg.train"], "-m"),
        (["-m", "holmes_ext", "jobs/train.py"], "jobs/train.py"),
    ]:
        records, pids = case.run(*how, *arguments, "--holmes", **SRUN)
        assert sorted(record["pid"] for record in records) == sorted(pids)
        assert {record["argv"][0] for record in records} == {argv0}


CHILDREN = """
import multiprocessing, os, subprocess, sys
def work(x): return sys.argv
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool: pool.map(work, [1])
    with multiprocessing.get_context("forkserver").Pool(1) as pool: pool.map(work, [1])
    subprocess.run([sys.executable, "jobs/train.py", "--holmes"], check=True, stdout=subprocess.DEVNULL)
    shell = ["sh", "-c", f"{sys.executable} -m holmes_ext jobs/train.py; true"]
    subprocess.run(shell, check=True, stdout=subprocess.DEVNULL)
    print(os.getpid())
"""


@pytest.mark.parametrize("how", [[], ["-m", "holmes_ext"]])
@pytest.mark.parametrize("environ", [{}, {"HOLMES": "1"}])
def test_children_of_a_worker_are_left_alone(case, how, environ):
    script = case.write("children.py", CHILDREN)
    records, pid = case.run(*how, script, "--holmes", **WORKER, **environ)
    assert [record["pid"] for record in records] == [pid]


def test_a_worker_that_executes_itself_again_is_activated_again(case):
    script = case.write(
        "again.py",
        "import os, sys\nif 'again' in sys.argv: print(os.getpid())\n"
        "else: os.execv(sys.executable, [sys.executable, __file__, 'again'])",
    )
    records, pid = case.run(script, HOLMES="1", **WORKER)
    assert [record["pid"] for record in records] == [pid, pid]


@pytest.mark.parametrize("without_pth", [False, True])
def test_python_m_holmes_ext_runs_a_script_as_if_alone(case, without_pth):
    how, environ = ["-m", "holmes_ext"], dict(WORKER)
    if without_pth:
        how, environ["PYTHONPATH"] = (
            ["-S", *how],
            str(next(case.python.parent.parent.glob("lib/*/site-packages"))),
        )
    alone = case.run("jobs/train.py", "--lr", "1")[1]
    for flags in [], ["--holmes"]:
        records, shown = case.run(*how, *flags, "jobs/train.py", "--lr", "1", *flags, **environ)
        assert len(records) == 1 and records[0]["path0"] == str(case.folder)
        alone[1][0] = alone[3]  # sys.argv[0] becomes absolute, as __file__ is
        assert shown == alone
    alone = case.run("-m", "pkg.train", "x")[1]
    assert case.run(*how, "-m", "pkg.train", "x", **environ)[1] == alone


def test_python_m_holmes_ext_passes_flags_and_exit_status_on(case):
    script = case.write("exit.py", "raise SystemExit(7)")
    records, _ = case.run("-m", "holmes_ext", "--holmes-plan", "p.json", script, "x", expect=7)
    assert records[0]["argv"] == [str(script), "--holmes-plan", "p.json", "x"]
    assert case.run("-m", "holmes_ext", "jobs/train.py", "--holmes", HOLMES="0")[0] == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "no program to run"),
        (["gone.py"], "gone.py: no such script"),
        (["-m"], "no program"),
        (["--lr", "1"], "--lr is not a flag of holmes"),
        (["-m", "torch.distributed.run", "x.py"], "starts workers itself"),
    ],
)
def test_python_m_holmes_ext_bad_usage(case, arguments, message):
    assert case.run("-m", "holmes_ext", *arguments, expect=2) == ([], None)
    assert message in case.stderr and case.stderr.count("\n") == 1
