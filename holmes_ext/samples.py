"""Finds the example programs and models that the demo and the benchmarks use."""

from pathlib import Path


def examples() -> Path:
    """Return the folder of the examples: in the installed package, or in the git clone."""
    package = Path(__file__).resolve().parent
    installed = package / "examples"
    return installed if installed.is_dir() else package.parent / "examples"
