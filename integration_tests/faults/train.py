"""examples/deepspeed_pipeline/train.py with a checkpoint after every step, from the last one where there is
one: what a launcher restarts.

    train.py SAVE JOB [ARGS]

    JOB   JSON: {} or {"log", "pause_s", "timeout_s", "ranks": {"rank": {"do": "kill" | "stop", "when"}}}

Prints "step N saved". timeout_s: of the process groups. `ranks` (the launcher's) end or stop themselves,
"when" in step 3 they would reduce gradients or send activations ("reduce", "send"), or have written half of
the first file of its checkpoint ("save").
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

SAVE, JOB = Path(sys.argv.pop(1)), json.loads(sys.argv.pop(1))
TRAIN = Path(__file__).resolve().parents[2] / "examples" / "deepspeed_pipeline" / "train.py"
FAULTY_STEP = 3


def before(function, act):
    """`function`, but act(*args) is called first."""

    @functools.wraps(function)
    def both(*args, **kwargs):
        act(*args)
        return function(*args, **kwargs)

    return both


def prepare_engine(mine):
    """mine: what this rank does to itself, and when."""
    import deepspeed
    import torch
    from deepspeed.runtime.pipe import schedule
    from deepspeed.runtime.pipe.engine import PipelineEngine

    if "timeout_s" in JOB:
        limit = timedelta(seconds=JOB["timeout_s"])
        deepspeed.init_distributed = functools.partial(deepspeed.init_distributed, timeout=limit)
        of_groups = torch.distributed.distributed_c10d
        of_groups.default_pg_timeout = of_groups.default_pg_nccl_timeout = limit
    end = lambda: os.kill(  # noqa: E731
        os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[mine["do"]]
    )
    instructions = {"reduce": schedule.ReduceGrads, "send": schedule.SendActivation}
    if mine.get("when") in instructions:
        table, key = PipelineEngine._INSTRUCTION_MAP, instructions[mine["when"]]
        table[key] = before(
            table[key], lambda engine, *_: end() if engine.global_steps == FAULTY_STEP - 1 else None
        )
    if mine.get("when") == "save":

        def half(value, path, **_):
            if f"step{FAULTY_STEP}/" in str(path):
                whole = io.BytesIO()
                save(value, whole)
                Path(path).write_bytes(whole.getvalue()[: whole.tell() // 2])
                end()

        save, torch.save = torch.save, before(torch.save, half)
    store = PipelineEngine.save_checkpoint

    def save_checkpoint(engine, *args, **kwargs):
        store(engine, *args, **kwargs)
        os.write(1, f"step {engine.global_steps} saved\n".encode())
        time.sleep(JOB.get("pause_s", 0))

    PipelineEngine.save_checkpoint = save_checkpoint


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    prepare_engine(
        JOB.get("ranks", {}).get(os.environ.get("NODE_RANK"), {})
    )  # RANK is holmes's by now
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
