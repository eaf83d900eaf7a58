"""Real installs in small fresh environments, for the tests of packaging and switching on.

No network is needed.
"""

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    "holmes_ext",
    "patches",
    "examples",
    "setup.py",
    "pyproject.toml",
    "holmes_ext.pth",
    "README.md",
    "LICENSE",
    "lab",
)


@dataclass(frozen=True)
class Built:
    """The wheels of both distributions, holmes_ext and holmes_lab, and what they were built from."""

    sources: Path  # of holmes_ext; those of holmes_lab are in its folder lab/
    wheel: Path
    editable: Path
    lab_wheel: Path
    lab_editable: Path


@functools.cache
def built() -> Built:
    """Build the wheels of both distributions, once in this process."""
    top = Path(tempfile.mkdtemp(prefix="holmes-wheels-"))
    atexit.register(shutil.rmtree, top, ignore_errors=True)
    sources = copy_sources(top / "src")
    return Built(
        sources=sources,
        wheel=build(sources, top / "wheel"),
        editable=build(sources, top / "editable", editable=True),
        lab_wheel=build(sources / "lab", top / "lab-wheel"),
        lab_editable=build(sources / "lab", top / "lab-editable", editable=True),
    )


def copy_sources(to: Path) -> Path:
    """Copy what setup.py installs, so that a build leaves nothing in the working tree."""
    to.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(
                source, to / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
            )
        else:
            shutil.copy(source, to / name)
    return to


def build(sources: Path, out: Path, editable: bool = False) -> Path:
    """Build the wheel that `pip install .` (or `-e .`) would build.

    It uses the same PEP 517 (PEP 660) hook, without isolation.
    """
    hook = "build_editable" if editable else "build_wheel"
    out.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; build_meta.{hook}({str(out)!r})"
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, cwd=sources, capture_output=True, text=True, env=clean_environ()
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


def make(path: Path, *wheels: Path, dependencies: bool = False) -> Path:
    """Make a new environment without pip, install these wheels, and return the path of its python.

    dependencies: holmes_ext's own, without its extras, as links to those of this environment (no network is
    needed).
    """
    venv.create(path, with_pip=False)
    python = path / "bin" / "python"
    if wheels:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
        ]
        subprocess.run([*pip, *map(str, wheels)], check=True, env=clean_environ())
    (site_packages,) = path.glob("lib/*/site-packages")
    for name in bare_dependencies() if dependencies else ():
        for entry in {str(file).split("/")[0] for file in metadata.files(name) or ()} - {
            "..",
            "__pycache__",
        }:
            (site_packages / entry).symlink_to(metadata.distribution(name).locate_file(entry))
    return python


def bare_dependencies() -> set[str]:
    """List the distributions that holmes_ext requires, and those that they require.

    The bare install brings them with it.
    """
    found, todo = set(), ["holmes_ext"]
    while todo:
        for line in metadata.requires(todo.pop()) or ():
            requirement = Requirement(line)
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if wanted and requirement.name not in found:
                found.add(requirement.name)
                todo.append(requirement.name)
    return found


def clean_environ(**extra: str) -> dict[str, str]:
    """Return this process's environment without anything that would switch holmes on.

    Variables that change where modules come from are removed too.
    """
    drop = (
        "HOLMES",
        "PYTHON",
        "SLURM_",
        "OMPI_",
        "PMI_",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "PIP_REQUIRE_VIRTUALENV",
    )
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(drop)},
        **extra,
    }


def run(python: Path, *arguments, cwd: Path, **environ: str) -> subprocess.CompletedProcess:
    command = [str(python), *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=clean_environ(**environ), capture_output=True, text=True, timeout=300
    )
