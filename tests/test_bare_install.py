"""The bare install (no torch, no framework), as on a login node or a laptop.

The tests check which rooms can be imported and which commands run.
"""

import json
import shutil

import pytest
import venvs
from sysfs_builder import dgx_a100
from telemetry_files import write

CLUSTERS = venvs.ROOT / "examples/clusters"
ALL = """
import importlib, pkgutil, sys
import holmes_ext.cluster, holmes_ext.plan, holmes_ext.doctor, holmes_ext.report, holmes_ext.patches
for room in (holmes_ext.cluster, holmes_ext.plan, holmes_ext.doctor, holmes_ext.report, holmes_ext.patches):
    for module in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
        importlib.import_module(module.name)
print(len([name for name in sys.modules if name.startswith("holmes_ext.")]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """holmes_ext alone, without holmes_lab."""
    return venvs.make(
        tmp_path_factory.mktemp("bare") / "venv", venvs.built().wheel, dependencies=True
    )


def test_there_is_no_torch(python, tmp_path):
    assert "torch" not in venvs.bare_dependencies() > {"rich", "wrapt", "packaging"}
    assert "No module named 'torch'" in venvs.run(python, "-c", "import torch", cwd=tmp_path).stderr


def test_rooms_that_need_no_torch_import(python, tmp_path):
    result = venvs.run(python, "-c", ALL, cwd=tmp_path)
    assert result.returncode == 0 and int(result.stdout) > 80, result.stderr


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--help"], "discover"),
        (["discover", "--sysfs", "dgx"], "mlx5_0:1"),
        (["discover", "--sysfs", "dgx", "--json"], '"nics"'),
        (["plan", "--cluster", "two_clusters_4.toml", "--sizes", "pipeline=2"], "predicted step"),
        (
            ["plan", "--cluster", "two_clusters_4.toml", "--sizes", "pipeline=2", "--json"],
            '"transports"',
        ),
        (["doctor", "--sysfs", "dgx"], "0 problems"),
        (["doctor", "--sysfs", "dgx", "--json"], '"findings"'),
        (
            [
                "doctor",
                "--sysfs",
                "dgx",
                "--cluster",
                "two_clusters_4.toml",
                "--",
                "python",
                "no.py",
                "--holmes",
            ],
            "fix:",
        ),
        (["patches"], "not installed here (and their features): torch 11, deepspeed "),
        (["patches", "--json", "--check"], "torch is not installed"),
        (["report", "telemetry"], "2 ranks"),
        (["report", "telemetry", "--json"], '"steps"'),
    ],
    ids=" ".join,
)
def test_commands_run(python, tmp_path, arguments, words):
    dgx_a100(tmp_path / "dgx")
    write(tmp_path / "telemetry")
    shutil.copy(CLUSTERS / "two_clusters_4.toml", tmp_path)
    result = venvs.run(python.parent / "holmes", *arguments, cwd=tmp_path, HOLMES_NODE="a0")
    assert (
        result.returncode in (0, 1) and words in result.stdout and "Traceback" not in result.stderr
    ), result.stderr
    if "--json" in arguments:
        json.loads(result.stdout)


@pytest.mark.parametrize("command", ["lab", "demo"])
def test_commands_of_the_lab_say_what_to_install(python, tmp_path, command):
    result = venvs.run(python.parent / "holmes", command, cwd=tmp_path)
    assert result.returncode == 2 and not result.stdout and result.stderr.count("\n") == 1, (
        result.stderr
    )
    assert result.stderr.startswith("holmes: ") and "pip install ./lab" in result.stderr


def test_the_demo_says_what_it_needs(tmp_path):
    built = venvs.built()
    python = venvs.make(tmp_path / "venv", built.wheel, built.lab_wheel, dependencies=True)
    result = venvs.run(python.parent / "holmes", "demo", cwd=tmp_path)
    assert (
        result.returncode == 2
        and result.stderr.startswith("holmes: demo needs torch")
        and not result.stdout
    )
    assert result.stderr.count("\n") == 1 and "pip install torch" in result.stderr


def test_nodes_that_cannot_meet_say_so_in_one_line(python, tmp_path):
    dgx_a100(tmp_path / "dgx")
    rank = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    result = venvs.run(python.parent / "holmes", "doctor", "--sysfs", "dgx", cwd=tmp_path, **rank)
    assert result.returncode == 2 and result.stderr.startswith("holmes: torch is not installed")
    assert result.stderr.count("\n") == 1
