"""Runs a script of DeepSpeed's pipeline engine, and lets telemetry record every second step only.

    telemetry_turns.py SCRIPT ARGUMENTS        run by benchmarks/telemetry.py;
                                               step 0 is recorded, step 1 is not

holmes wraps the engine's train_batch(). This program wraps it once more, on the outside, and takes
the recorder away before every second step. Such a step costs one comparison with None for each
operation.
"""

import os
import runpy
import sys

from deepspeed.runtime.pipe.engine import PipelineEngine

from holmes_ext.runtime.measure import telemetry

train_batch, kept, step = PipelineEngine.train_batch, None, 0


def in_turn(*args, **kwargs):
    global kept, step
    kept = kept or telemetry.recorder
    telemetry.set_recorder(kept if step % 2 == 0 else None)
    step += 1
    try:
        return train_batch(*args, **kwargs)
    finally:
        telemetry.set_recorder(kept)


PipelineEngine.train_batch = in_turn
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
