"""A megatron-core program that calls holmes_ext.initialize_model_parallel, without --holmes.

It then makes groups with HyperCommGrid. Each rank prints a JSON line with its rank and node, its groups and
their networks.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2] / "examples" / "megatron_core" / "on_cpu")
)

import megatron_cpu_shim  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import ModelParallelConfig, parallel_state  # noqa: E402
from megatron.core.hyper_comm_grid import HyperCommGrid  # noqa: E402
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: E402

import holmes_ext  # noqa: E402
from holmes_ext.runtime import session  # noqa: E402

dist.init_process_group("gloo")
before = dist.get_rank()
if before == 0:
    # This rank hosts the store of the process group, which initialize_model_parallel destroys to make another
    # one. The rank leaves late, long after the other ranks, which must not meet it in the old group again.
    destroy = dist.destroy_process_group

    def destroy_late():
        dist.destroy_process_group = destroy
        time.sleep(4)
        destroy()

    dist.destroy_process_group = destroy_late
holmes_ext.initialize_model_parallel(1, pipeline_model_parallel_size=2)
rank = dist.get_rank()
data = parallel_state.get_data_parallel_group()
value = torch.ones(1) * rank
dist.all_reduce(value, group=data)
records = session.require().groups
data_record = next(record for record in records if record.name == "DATA_PARALLEL_GROUP")

HyperCommGrid([2, 2], ["dp", "pp"], backend="gloo").create_pg("dp")
grid = records[-1]
# Four stages in a chain, each adding 1: the pairs' groups are made on the first send.
stages = P2PCommunicator(
    HyperCommGrid([4], ["pp"], backend="gloo").create_pg("pp"),
    ModelParallelConfig(pipeline_dtype=torch.float32),
)
chain = torch.ones(2, 1, 4) if rank == 0 else stages.recv_forward((2, 1, 4), False) + 1
stages.send_forward(chain, rank == 3)

report = {
    "rank": rank,
    "before": before,
    "node": socket.gethostname(),
    "local_rank": os.environ["LOCAL_RANK"],
    "data": dist.get_process_group_ranks(data),
    "sum": value.item(),
    "fabric": data_record.transport.kind,
    "grid": grid.ranks,
    "grid_fabric": grid.transport.kind,
    "chain": chain[0, 0, 0].item(),
    "pairs": [
        record.transport.kind
        for record in records
        if record.name in ("pipeline pair", "pipeline activations")
    ],
}
print(json.dumps(report), flush=True)
dist.destroy_process_group()
