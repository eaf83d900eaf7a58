"""holmes_ext/extensions.py: what an extension adds, and what happens if one is broken or clashes."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sysfs_builder
import venvs

from holmes_ext import extensions
from holmes_ext.cli.main import _COMMANDS, commands, main
from holmes_ext.errors import HolmesError
from holmes_ext.extensions import Extension, Option
from holmes_ext.options import Options, names, options_from, parse_flags
from holmes_ext.patches import all_patches, core_patches

EXAMPLE = venvs.ROOT / "examples" / "extension"
CLUSTER = str(venvs.ROOT / "examples" / "clusters" / "two_clusters_4.toml")


class EntryPoint:
    """What importlib.metadata gives for an entry point: `load` returns the extension, or raises."""

    def __init__(self, name, load):
        self.name, self.value, self.load = name, f"{name}:EXTENSION", load


@pytest.fixture
def installed(monkeypatch):
    """Install extensions into this process."""

    def install(*points):
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: list(points))
        extensions.found.cache_clear()

    yield install
    extensions.found.cache_clear()
    extensions._problems.clear()


def test_options_commands_and_patches_are_added(installed):
    extension = Extension(
        "third",
        options=(Option("third_level", "a number", default="1", choices=("1", "2")),),
        commands={"third": "third.command"},
    )
    installed(EntryPoint("third", lambda: extension))
    assert "third_level" in names() and commands()["third"] == "third.command"
    options, rest = parse_flags(["--holmes-third-level", "2", "x"], {})
    assert options.value("third_level") == "2" and rest == ["x"]
    assert Options().value("third_level") == "1" == Options().agreed()["third_level"]
    assert parse_flags([], {"HOLMES_THIRD_LEVEL": "2"})[0].value("third_level") == "2"
    with pytest.raises(HolmesError, match="'3' is not one of 1, 2"):
        options_from(third_level=3)


def test_a_check_of_an_option_refuses_values(installed):
    option = Option(
        "third", "a number", check=lambda value: "" if value.isdecimal() else "is not a number"
    )
    installed(EntryPoint("third", lambda: Extension("third", options=(option,))))
    assert options_from(third="7").value("third") == "7"
    with pytest.raises(HolmesError, match="--holmes-third: 'x' is not a number"):
        options_from(third="x")


def broken():
    raise RuntimeError("two\nlines")


@pytest.mark.parametrize(
    "load, reason", [(broken, "RuntimeError: two lines"), (lambda: 7, "TypeError")]
)
def test_a_broken_extension_is_left_out_with_one_line(installed, load, reason, capsys):
    installed(EntryPoint("third", load))
    (problem,) = extensions.problems()
    assert (
        problem.startswith("extension third is left out: ")
        and reason in problem
        and "\n" not in problem
    )
    assert main(["plan", "--cluster", CLUSTER, "--pipeline", "2"]) == 0
    assert capsys.readouterr().err == f"holmes: {problem}\n"


def test_a_broken_contribution_is_left_out_with_one_line(installed):
    extension = Extension(
        "third", contributions={"doctor_checks": {"third": "no_such_module:check"}}
    )
    installed(EntryPoint("third", lambda: extension))
    assert extensions.objects("doctor_checks") == {}
    (problem,) = extensions.problems()
    assert "no_such_module:check" in problem and "ModuleNotFoundError" in problem


@pytest.mark.parametrize(
    "fields, clash",
    [
        ({"options": (Option("join", "x"),)}, "flag --holmes-join: join and third"),
        ({"commands": {"join": "x"}}, "command 'join': join and third"),
    ],
)
def test_two_with_one_flag_or_command_are_an_error(installed, fields, clash, capsys):
    installed(EntryPoint("third", lambda: Extension("third", **fields)))
    assert main(["plan", "--cluster", CLUSTER]) == 2
    assert clash in capsys.readouterr().err


def test_flags_and_commands_of_holmes_itself_cannot_be_taken(installed, capsys):
    installed(EntryPoint("third", lambda: Extension("third", options=(Option("cluster", "x"),))))
    with pytest.raises(HolmesError, match="flag --holmes-cluster of holmes itself"):
        parse_flags([], {})
    installed(EntryPoint("third", lambda: Extension("third", commands={"plan": "x"})))
    assert main(["plan", "--cluster", CLUSTER]) == 2
    assert "command 'plan' of holmes itself" in capsys.readouterr().err


def test_names_of_points_and_hooks_are_checked():
    with pytest.raises(HolmesError, match="no contribution point 'nics'"):
        Extension("third", contributions={"nics": {}})
    with pytest.raises(HolmesError, match="no hook 'on_end'"):
        Extension("third", hooks={"on_end": "x:y"})


def test_declared_features_are_those_of_the_patches():
    for extension in extensions.found().extensions:
        for module, features in extension.patches.items():
            patches = extensions.load(module).PATCHES
            assert set(features) == {patch.feature.name for patch in patches}, module
    assert set(core_patches()) < set(all_patches())


def test_everything_that_is_declared_exists():
    for extension in extensions.found().extensions:
        references = [*extension.commands.values(), *extension.hooks.values()]
        for contributed in extension.contributions.values():
            references += contributed.values()
        for reference in references:
            assert extensions.load(reference) is not None


def test_without_the_lab_its_commands_say_what_to_install(installed, capsys):
    installed()
    assert main(["demo"]) == 2
    assert "demo needs the package holmes_lab: pip install ./lab" in capsys.readouterr().err
    assert set(_COMMANDS) | {"join", "weights"} == set(commands())


def test_the_built_in_ones_work_without_metadata(tmp_path):
    """A source tree on PYTHONPATH, in a Python that holmes_ext is not installed in."""
    (tmp_path / "holmes_ext").symlink_to(venvs.ROOT / "holmes_ext")
    code = "from holmes_ext import extensions; print([one.name for one in extensions.found().extensions])"
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environ, capture_output=True, text=True
    )
    assert result.stdout.strip() == "['planner', 'adapt', 'join', 'weights']", result.stderr


@pytest.fixture
def example(tmp_path):
    """Environment with examples/extension installed."""
    target = tmp_path / "packages"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "--target",
            target,
            shutil.copytree(EXAMPLE, tmp_path / "source"),
        ],
        check=True,
    )
    return {**os.environ, "PYTHONPATH": str(target)}


def run(environ, *argv, code=""):
    command = (
        [sys.executable, "-c", code]
        if code
        else [sys.executable, "-m", "holmes_ext.cli.main", *argv]
    )
    return subprocess.run(command, env=environ, capture_output=True, text=True)


def test_the_example_adds_a_command_a_flag_and_a_nic_kind(example, tmp_path):
    result = run(example, "truescale")
    assert (result.returncode, result.stdout) == (0, "qib: 1.0 us\n"), result.stderr
    assert "truescale" in run(example, "--help").stdout

    script = tmp_path / "train.py"
    script.write_text("print('trains')")
    flags = ["--holmes", "--holmes-truescale-note", "hello"]
    job = subprocess.run(
        [sys.executable, "-m", "holmes_ext", script, *flags],
        env=example,
        capture_output=True,
        text=True,
    )
    assert job.returncode == 0 and "trains" in job.stdout, job.stderr
    assert "truescale: hello" in job.stdout + job.stderr

    tree = sysfs_builder.dgx_a100(tmp_path / "sys")
    hca = sorted((Path(tree) / "class/infiniband").iterdir())[0]
    uevent = hca / "device" / "uevent"
    uevent.write_text(uevent.read_text().replace("DRIVER=mlx5_core", "DRIVER=ib_qib"))
    code = (
        f"from holmes_ext.cluster.sysfs.node import read_nics\n"
        f"print(sorted({{nic.kind for nic in read_nics({str(tree)!r})}}))"
    )
    assert run(example, code=code).stdout.strip() == "['ethernet', 'ib', 'qib', 'roce']"
