"""Runs examples/megatron_core/train.py from its last checkpoint, if there is one.

    resumes.py SAVE [ARGS]

A launcher can start it again after a failure.
"""

import runpy
import sys
from pathlib import Path

SAVE = Path(sys.argv.pop(1))
TRAIN = Path(__file__).resolve().parents[2] / "examples" / "megatron_core" / "train.py"

if __name__ == "__main__":
    sys.path.insert(0, str(TRAIN.parent))
    sys.argv = [str(TRAIN), *sys.argv[1:], "--save", str(SAVE)]
    if (SAVE / "latest.json").is_file():
        sys.argv += ["--load", str(SAVE)]
    runpy.run_path(str(TRAIN), run_name="__main__")
