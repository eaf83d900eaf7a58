"""Calls megatron-core's initialize_model_parallel with one bad input after the other, then with good ones, in
the same processes.

    megatron_refusals.py CALLS.json      [[arguments], ...]

Prints, as JSON: of each call the error's line, and whether any group existed afterwards; and what an
all-reduce gave at the end.
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
told = []
for arguments in json.loads(Path(sys.argv[1]).read_text()):
    try:
        parallel_state.initialize_model_parallel(**arguments)
        told.append(["", True])
    except HolmesError as error:
        told.append(
            [
                str(error),
                len(dist.distributed_c10d._world.pg_map) > 1 or parallel_state.is_initialized(),
            ]
        )
parallel_state.initialize_model_parallel(1, 2)
value = torch.ones(1) * dist.get_rank()
dist.all_reduce(value, group=parallel_state.get_data_parallel_group())
print(json.dumps({"rank": dist.get_rank(), "told": told, "sum": value.item()}), flush=True)
dist.destroy_process_group()
