"""examples/megatron_core where torch is the CUDA build and there is no GPU."""

import os
import subprocess
import sys

from test_docs import ROOT

PROGRAM = """
import runpy, sys, torch
torch.version.cuda = "13.0"
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_it_trains_on_the_cpu(tmp_path):
    size = (
        "--layers 2 --hidden 32 --heads 2 --sequence 16 --micro-batch 1 --micro-batches 2 --steps 2"
    ).split()
    script = ROOT / "examples" / "megatron_core" / "train.py"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, script, *size],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0 and "loss" in done.stdout, done.stderr[-2000:]
