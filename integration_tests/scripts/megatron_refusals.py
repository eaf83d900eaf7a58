"""Calls megatron-core's initialize_model_parallel with bad inputs, and then with good ones.

    megatron_refusals.py CALLS.json      [{arguments}, ...]

All calls are in the same processes. Each rank prints a JSON line: for each call, the error and whether any
group exists afterwards; and the result of an all-reduce at the end.
"""

import json
import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2] / "examples" / "megatron_core" / "on_cpu")
)

import megatron_cpu_shim  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

from holmes_ext.errors import HolmesError  # noqa: E402

dist.init_process_group("gloo")
errors = []  # [message, whether any process group exists] of each call
for arguments in json.loads(Path(sys.argv[1]).read_text()):
    try:
        parallel_state.initialize_model_parallel(**arguments)
        errors.append(["", True])
    except HolmesError as error:
        has_new_group = len(dist.distributed_c10d._world.pg_map) > 1
        errors.append([str(error), has_new_group or parallel_state.is_initialized()])
parallel_state.initialize_model_parallel(1, 2)
value = torch.ones(1) * dist.get_rank()
dist.all_reduce(value, group=parallel_state.get_data_parallel_group())
print(json.dumps({"rank": dist.get_rank(), "told": errors, "sum": value.item()}), flush=True)
dist.destroy_process_group()
