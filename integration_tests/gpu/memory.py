"""memory.py FOLDER SCRIPT ARGS: SCRIPT, and in FOLDER a JSON file of each rank: what it held after each step.

peak         bytes that the caching allocator gave out at most after the third step (holmes learns before)
gradients    bytes of the parameters that the optimizer has gradients of
in_flight    micro-batches of each stage under holmes; [] where the framework decides
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

LEARNT = 3
found: dict = {"steps": [], "in_flight": []}


def after_a_step(optimizer, args, kwargs):
    if len(found["steps"]) == LEARNT:
        torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found["steps"].append(
        [
            torch.cuda.memory_allocated(),
            len(os.listdir("/proc/self/task")),
            len(os.listdir("/proc/self/fd")),
            pages * os.sysconf("SC_PAGE_SIZE"),
        ]
    )
    found["peak"] = torch.cuda.max_memory_allocated()
    found["gradients"] = sum(p.nbytes for group in optimizer.param_groups for p in group["params"])
    found["rank"] = dist.get_rank()
    if "holmes_ext.runtime.session" in sys.modules:
        from holmes_ext.runtime import session

        if (current := session.active()) is not None:
            found["in_flight"] = list(current.in_flight)


register_optimizer_step_post_hook(after_a_step)
_, folder, *sys.argv = sys.argv
sys.path.insert(0, os.path.dirname(sys.argv[0]))
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    Path(folder, f"rank{found.get('rank', '')}.json").write_text(json.dumps(found))
