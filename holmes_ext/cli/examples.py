"""Command `holmes examples`: copies the documentation's scripts, cluster files and models."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.samples import examples


def add_parser(subparsers: Any) -> None:
    """Add the command `examples` with its options to the parser of `holmes`."""
    parser = subparsers.add_parser(
        "examples",
        help="copy the documentation's scripts, cluster files and models into a new folder",
        description="Copy the examples that the documentation's commands use (examples/clusters/... and "
        "so on) into a new folder. They are part of holmes_ext; a clone has them already.",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        default="examples",
        metavar="FOLDER",
        help="the folder, which must not exist (default: examples)",
    )


def run(args: argparse.Namespace) -> int:
    """Copy the examples and return 0.

    Raises:
        HolmesError: the folder exists or cannot be written.
    """
    folder = Path(args.folder)
    if folder.exists():
        raise HolmesError(f"holmes examples: {folder} exists; give another folder")
    try:
        shutil.copytree(examples(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        raise HolmesError(
            f"holmes examples: {folder} cannot be written: {error.strerror or error}"
        ) from None
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    return 0
