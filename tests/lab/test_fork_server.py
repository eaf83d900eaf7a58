"""lab/process/fork_server.py: a rank that was forked from a preloaded Python.

To its script, it looks like a fresh interpreter.
"""

import json
import subprocess
import sys

import pytest
from holmes_lab.process.fork_server import script_of

REPORT = """
import json, os, sys
print(json.dumps([sys.argv, sys.path[0], __name__, os.environ.get("X"), os.getcwd()]))
"""
RUN = """
import json, sys, types
seen = []
switch = types.ModuleType("holmes_ext.job")
switch.activate = lambda argv: (seen.append(list(argv)), \
argv.remove("--holmes") if "--holmes" in argv else None)
sys.modules["holmes_ext.job"] = switch
from holmes_lab.process.fork_server import run_script
try:
    variables = run_script(json.loads(sys.argv[1]), json.loads(sys.argv[2]))
finally:
    print(json.dumps(seen))
"""


@pytest.mark.parametrize(
    "command, expected",
    [
        (["python", "x.py", "-v"], ("python", ["x.py", "-v"])),
        (["/venv/bin/python3.11", "-u", "x.py"], ("/venv/bin/python3.11", ["x.py"])),
        (["python", "-m", "pkg.main", "a"], ("python", ["-m", "pkg.main", "a"])),
        (["python", "-c", "pass"], None),
        (["python", "-m"], None),
        (["python"], None),
        (["bash", "x.sh"], None),
        ([], None),
    ],
)
def test_commands_that_can_be_preloaded(command, expected):
    assert script_of(command) == expected


def fresh(arguments, env, cwd):
    done = subprocess.run(
        [sys.executable, *arguments], env=env, cwd=cwd, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def forked(arguments, env, cwd):
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(arguments), json.dumps(env)],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    return json.loads(first), json.loads(second)


@pytest.fixture
def environment(monkeypatch):
    import holmes_ext

    root = str(next(iter(holmes_ext.__path__))).rsplit("/", 1)[0]
    return {"PYTHONPATH": root, "PATH": "/usr/bin", "X": "from env"}


@pytest.mark.parametrize("arguments", [["sub/x.py", "a", "b"], ["-m", "module", "c"]])
def test_argv_path_main_environment_and_directory(tmp_path, environment, arguments):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/x.py").write_text(REPORT)
    (tmp_path / "module.py").write_text(REPORT)
    expected = fresh(arguments, environment, tmp_path)
    report, activated = forked(arguments, environment, tmp_path)
    assert report == expected and activated == []


@pytest.mark.parametrize(
    "arguments, env", [(["x.py", "--holmes", "a"], {}), (["x.py", "a"], {"HOLMES": "1"})]
)
def test_holmes_is_switched_on_before_the_script(tmp_path, environment, arguments, env):
    (tmp_path / "x.py").write_text(REPORT)
    report, activated = forked(arguments, {**environment, **env}, tmp_path)
    assert activated == [arguments] and report[0] == ["x.py", "a"]


def test_variables_live_until_the_interpreter_ends(tmp_path, environment):
    """What a variable ends in its destructor it ends after functions of atexit."""
    (tmp_path / "ends.py").write_text(
        "class Ends:\n    def __del__(self):\n        print('variable')\n"
    )
    (tmp_path / "x.py").write_text(f"""{REPORT}
import atexit, ends
variable = ends.Ends()
atexit.register(print, "atexit")
""")
    for arguments in (["x.py"], ["-m", "x"]):
        ways = [
            arguments,
            ["-m", "holmes_ext", *arguments],
            ["-c", RUN, json.dumps(arguments), json.dumps(environment)],
        ]
        for way in ways:
            done = subprocess.run(
                [sys.executable, *way],
                env={**environment, "HOLMES": "0"},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=True,
            )
            assert done.stdout.splitlines()[-2:] == ["atexit", "variable"], way
