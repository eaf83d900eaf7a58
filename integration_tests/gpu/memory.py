"""Runs a training script, and writes the memory that each rank held after each step.

    memory.py FOLDER SCRIPT ARGS

Each rank writes a JSON file into FOLDER:

    peak         largest number of bytes that the caching allocator held after the third step (holmes learns
                 the order of gradients before)
    gradients    bytes of the parameters that the optimizer has gradients of
    in_flight    micro-batches of each stage under holmes; [] if the framework decides
    steps        [allocated bytes, threads, open files, resident bytes of the process] after each step
"""

import gc
import json
import os
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

FIRST_STEPS = 3  # in which holmes learns the order of gradients
record: dict = {"steps": [], "in_flight": []}


def after_a_step(optimizer, args, kwargs):
    """Record the resources of this process, after a step of the optimizer."""
    if len(record["steps"]) == FIRST_STEPS:
        torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    record["steps"].append(
        [
            torch.cuda.memory_allocated(),
            len(os.listdir("/proc/self/task")),
            len(os.listdir("/proc/self/fd")),
            pages * os.sysconf("SC_PAGE_SIZE"),
        ]
    )
    record["peak"] = torch.cuda.max_memory_allocated()
    record["gradients"] = sum(p.nbytes for group in optimizer.param_groups for p in group["params"])
    record["rank"] = dist.get_rank()
    if "holmes_ext.runtime.session" in sys.modules:
        from holmes_ext.runtime import session

        if (current := session.active()) is not None:
            record["in_flight"] = list(current.in_flight)


register_optimizer_step_post_hook(after_a_step)
_, folder, *sys.argv = sys.argv
sys.path.insert(0, os.path.dirname(sys.argv[0]))
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    Path(folder, f"rank{record.get('rank', '')}.json").write_text(json.dumps(record))
