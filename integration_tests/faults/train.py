"""examples/deepspeed_pipeline/train.py with a checkpoint after every step, from the last one where there is one: what torchrun restarts.

    train.py SAVE [ARGS]
"""

import os
import runpy
import sys
from pathlib import Path

SAVE = Path(sys.argv.pop(1))
TRAIN = Path(__file__).resolve().parents[2] / "examples" / "deepspeed_pipeline" / "train.py"


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    SAVE.mkdir(exist_ok=True)
    sys.path.insert(0, str(TRAIN.parent))
    sys.argv = [str(TRAIN), *sys.argv[1:], "--save", str(SAVE), "--save-every", "1", "--log", str(SAVE / "log")]
    if (SAVE / "latest").is_file() and (SAVE / "identity.json").is_file():
        sys.argv += ["--load", str(SAVE)]
    runpy.run_path(str(TRAIN), run_name="__main__")
