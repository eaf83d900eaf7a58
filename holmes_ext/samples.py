"""Where the examples lie that the demo and the benchmarks run."""

from pathlib import Path


def examples() -> Path:
    """The folder examples/ of the clone that holmes_ext runs from, or the one that was installed with it."""
    package = Path(__file__).resolve().parent
    installed = package / "examples"
    return installed if installed.is_dir() else package.parent / "examples"
