"""Jobs that die under telemetry end with the status that Python gives them, never by abort (134).

The jobs have two ranks, over gloo, or over NCCL on emulated GPUs (HOLMES_TEST_CARRIER=nccl). All ranks are
forked from one process that has imported torch: an import takes longer than a death.
"""

import json
import os
import subprocess
import sys

import carriers
import pytest
import ranks

#: Script of a rank. Its arguments: the way to die, the backend, and the device.
SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

way, backend, device = sys.argv[1:4]
if device == "cuda":
    device = f"cuda:{os.environ['LOCAL_RANK']}"
    torch.cuda.set_device(device)
dist.init_process_group(backend)
layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).to(device)
model = DistributedDataParallel(layers, bucket_cap_mb=0.02)
optimizer = torch.optim.Adam(model.parameters())


def train():
    loss = model(torch.randn(8, 64, device=device)).sum()
    loss.backward()
    optimizer.step()
    return loss


def fail(gradient):
    raise ValueError("in a backward hook")


train()
if way == "exit":
    sys.exit(3)
if way == "exit alone":  # in an all-reduce in which the other rank takes no part
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1 << 16, device=device), async_op=True)
    sys.exit(3)
if way == "hook":  # of the layer whose gradients come last: the other bucket is under way
    layers[0].weight.register_hook(fail)
    train()
if way == "under way":
    works = [dist.all_reduce(torch.ones(1 << 20, device=device), async_op=True) for _ in range(4)]
    raise RuntimeError("boom")
if way == "out of memory":
    torch.empty(1 << 50, device=device)
if way == "not finite":
    with torch.no_grad():
        layers[0].weight.fill_(float("nan"))
    assert torch.isfinite(train()), "the loss is not finite"
"""
#: Forks both ranks for each way to die, and prints the way and their exit statuses as JSON. Its arguments:
#: a folder, the backend, the device, and the ways.
PROGRAM = """
import json, os, sys
import torch._dynamo, torch.distributed, torch.nn.parallel  # what a job imports
import holmes_ext.__main__ as holmes
import holmes_ext.job

folder, backend, device, *ways = sys.argv[1:]


def run(way, number, rank):
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    local = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    # another prefix of the keys in the store, as after a restart
    os.environ.update(local, TORCHELASTIC_RESTART_COUNT=str(number))
    telemetry = os.path.join(folder, str(number))
    flags = ["--holmes", "--holmes-telemetry", telemetry]
    sys.argv[:] = ["holmes", os.path.join(folder, "train.py"), way, backend, device, *flags]
    sys.exit(holmes.main())


for number, way in enumerate(ways):
    children = []
    for rank in range(2):
        child = os.fork()
        if not child:
            run(way, number, rank)
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(json.dumps([way, statuses]), flush=True)
"""
#: Way to die -> exit status.
STATUSES = {
    "end": 0,
    "exit": 3,
    "exit alone": 3,
    "hook": 1,
    "under way": 1,
    "out of memory": 1,
    "not finite": 1,
}


@pytest.mark.full(share=4)
def test_a_job_that_dies_ends_with_its_own_status(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    store, variables = ranks.hosted_store()
    environment = {**os.environ, **carriers.environment(count=2), **variables}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), carriers.BACKEND, carriers.DEVICE]
    result = subprocess.run(
        [*command, *STATUSES], env=environment, capture_output=True, text=True, timeout=600
    )
    del store  # it had to live until now
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert dict(lines) == {way: [status] * 2 for way, status in STATUSES.items()}, result.stderr
