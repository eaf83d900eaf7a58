"""Where the examples lie that the demo and the benchmarks run."""

from pathlib import Path

from holmes_ext.errors import HolmesError


def examples() -> Path:
    """The folder examples/ of the clone that holmes_ext runs from; HolmesError where that is no clone (a wheel)."""
    folder = Path(__file__).resolve().parents[2] / "examples"
    if not (folder / "deepspeed_pipeline" / "train.py").is_file():
        raise HolmesError(f"{folder} has no deepspeed_pipeline/train.py; run this from a clone (pip install -e .)")
    return folder
