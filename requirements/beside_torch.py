"""Installs packages into an environment, and keeps the torch that is installed there.

    VENV/bin/python requirements/beside_torch.py -r requirements/gpu.txt [more arguments of pip install]

pip replaces an installed torch without a warning if a package, or a constraint in pip's configuration
(`pip config list`), asks for another version. This script passes the version of the installed torch to pip as
a constraint. If pip cannot install the packages with it, the script ends with status 1 and one line that says
why, and torch is as before.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

PIP_INSTALL = (sys.executable, "-m", "pip", "install", "--no-input", "--no-compile")


def main(arguments: Sequence[str]) -> int:
    """Install what pip's `arguments` name, print a line if that fails, and return the exit status."""
    try:
        torch_version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        print(f"make: {sys.prefix} has no torch, beside which to install packages", file=sys.stderr)
        return 1

    with tempfile.TemporaryDirectory() as folder:
        constraint = Path(folder, "torch.txt")
        constraint.write_text(f"torch=={torch_version}\n")
        command = [*PIP_INSTALL, "-c", str(constraint), *arguments]
        environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode == 0:
        return 0
    reason = _reason(result.stdout + result.stderr)
    print(
        f"make: pip cannot install {' '.join(arguments)} and keep torch {torch_version}: {reason}",
        file=sys.stderr,
    )
    return 1


def _reason(output: str) -> str:
    """Return why pip failed: the requirements that exclude each other, else pip's first error.

    pip lists such requirements after a line that ends in "conflict is caused by:", each in an indented line.
    """
    _, _, conflict = output.partition("conflict is caused by:\n")
    requirements = re.match(r"(?:[ \t]+\S.*\n)+", conflict)
    if requirements:
        lines = requirements[0].splitlines()
        return "; ".join(line.strip() for line in lines)
    errors = re.findall(r"^ERROR: (.*)", output, re.MULTILINE)
    if errors:
        return errors[0]
    return "pip printed no error"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
