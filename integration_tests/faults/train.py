"""Runs examples/deepspeed_pipeline/train.py with a checkpoint after every step, and with a fault.

    train.py SAVE JOB [ARGS]

    JOB   JSON: {} or {"log", "pause_s", "timeout_s", "ranks": {"rank": {"do": "kill" | "stop", "when"}}}

It resumes from the last checkpoint if there is one, and prints "step N saved". timeout_s is the timeout of
the process groups. The launcher's ranks in `ranks` kill or stop themselves in step 3, "when" they would
reduce gradients ("reduce"), send activations ("send"), or have written half of the first file of the
checkpoint ("save").
"""

import functools
import io
import json
import os
import runpy
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

SAVE = Path(sys.argv.pop(1))
JOB = json.loads(sys.argv.pop(1))
TRAIN = Path(__file__).resolve().parents[2] / "examples" / "deepspeed_pipeline" / "train.py"
FAULTY_STEP = 3


def before(function, act):
    """Return a function that calls act(*args), and then `function`."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        act(*args)
        return function(*args, **kwargs)

    return wrapper


def prepare_engine(mine):
    """Patch DeepSpeed's engine: the timeout, the failure of this rank, and a message after each save.

    Args:
        mine: Failure of this rank, {"do": ..., "when": ...}; {} for none.
    """
    import deepspeed
    import torch
    from deepspeed.runtime.pipe import schedule
    from deepspeed.runtime.pipe.engine import PipelineEngine

    if "timeout_s" in JOB:
        limit = timedelta(seconds=JOB["timeout_s"])
        deepspeed.init_distributed = functools.partial(deepspeed.init_distributed, timeout=limit)
        distributed_c10d = torch.distributed.distributed_c10d
        distributed_c10d.default_pg_timeout = limit
        distributed_c10d.default_pg_nccl_timeout = limit

    def fail():
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[mine["do"]])

    def fail_in_faulty_step(engine, *_):
        if engine.global_steps == FAULTY_STEP - 1:
            fail()

    instructions = {"reduce": schedule.ReduceGrads, "send": schedule.SendActivation}
    if mine.get("when") in instructions:
        # Instruction of a schedule -> method of the engine.
        methods = PipelineEngine._INSTRUCTION_MAP
        instruction = instructions[mine["when"]]
        methods[instruction] = before(methods[instruction], fail_in_faulty_step)
    if mine.get("when") == "save":
        original_save = torch.save

        def write_half_and_fail(value, path, **_):
            if f"step{FAULTY_STEP}/" in str(path):
                buffer = io.BytesIO()
                original_save(value, buffer)
                Path(path).write_bytes(buffer.getvalue()[: buffer.tell() // 2])
                fail()

        torch.save = before(original_save, write_half_and_fail)
    original_save_checkpoint = PipelineEngine.save_checkpoint

    def save_checkpoint(engine, *args, **kwargs):
        original_save_checkpoint(engine, *args, **kwargs)
        os.write(1, f"step {engine.global_steps} saved\n".encode())
        time.sleep(JOB.get("pause_s", 0))

    PipelineEngine.save_checkpoint = save_checkpoint


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # NODE_RANK is still the launcher's number; holmes has changed RANK by now.
    prepare_engine(JOB.get("ranks", {}).get(os.environ.get("NODE_RANK"), {}))
    SAVE.mkdir(exist_ok=True)
    sys.path.insert(0, str(TRAIN.parent))
    sys.argv = [
        str(TRAIN),
        *sys.argv[1:],
        "--save",
        str(SAVE),
        "--save-every",
        "1",
        "--log",
        JOB.get("log", str(SAVE / "log")),
    ]
    if (SAVE / "latest").is_file():
        sys.argv += ["--load", str(SAVE)]
    runpy.run_path(str(TRAIN), run_name="__main__")
