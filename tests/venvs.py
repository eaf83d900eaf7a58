"""Real installs in small fresh environments, for the tests of packaging and switching on. No network is needed."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("holmes_ext", "patches", "setup.py", "pyproject.toml", "holmes_ext.pth")


def copy_sources(to: Path) -> Path:
    """A copy of what setup.py installs, so that a build leaves nothing in the working tree."""
    to.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, to / name)
    return to


def build(sources: Path, out: Path, editable: bool = False) -> Path:
    """The wheel that `pip install .` (or `-e .`) would build: the same PEP 517 (PEP 660) hook, without isolation."""
    hook = "build_editable" if editable else "build_wheel"
    out.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; build_meta.{hook}({str(out)!r})"
    result = subprocess.run([sys.executable, "-c", code], cwd=sources, capture_output=True, text=True,
                            env=clean_environ())
    assert result.returncode == 0, result.stdout + result.stderr
    wheel, = out.glob("*.whl")
    return wheel


def make(path: Path, *wheels: Path) -> Path:
    """A new environment without pip, these wheels installed without their dependencies; the path of its python."""
    venv.create(path, with_pip=False)
    python = path / "bin" / "python"
    if wheels:
        subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps",
                        "--no-index", *map(str, wheels)],
                       check=True, env=clean_environ())
    return python


def clean_environ(**extra: str) -> dict[str, str]:
    """This process's environment without anything that would switch holmes on or change where modules come from."""
    drop = ("HOLMES", "PYTHON", "SLURM_", "OMPI_", "PMI_", "RANK", "WORLD_SIZE", "LOCAL_", "PIP_REQUIRE_VIRTUALENV")
    return {**{name: value for name, value in os.environ.items() if not name.startswith(drop)}, **extra}


def run(python: Path, *arguments, cwd: Path, **environ: str) -> subprocess.CompletedProcess:
    return subprocess.run([str(python), *map(str, arguments)], cwd=cwd, env=clean_environ(**environ),
                          capture_output=True, text=True, timeout=60)
