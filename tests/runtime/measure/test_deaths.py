"""Jobs that die under telemetry end with the status that Python gives them, never by abort (134).

All ways are forked from one process that has imported torch: an import takes longer than a death.
"""

import subprocess
import sys

import pytest

#: Prints the way to die and its exit status for each way. Children run the job under holmes.
PROGRAM = """
import os, sys, tempfile
import torch._dynamo, torch.distributed, torch.nn.parallel  # what a job imports
import holmes_ext.__main__ as holmes
import holmes_ext.job

folder = tempfile.mkdtemp()
script = os.path.join(folder, "train.py")
with open(script, "w") as file:
    file.write('''
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.Adam(model.parameters())
model(torch.randn(8, 64)).sum().backward()
optimizer.step()
way = sys.argv[1]
if way == "exit":
    sys.exit(3)
if way == "hook":
    def bad(gradient):
        raise ValueError("in a backward hook")
    next(model.parameters()).register_hook(bad)
    model(torch.randn(8, 64)).sum().backward()
if way == "under way":
    works = [dist.all_reduce(torch.ones(1 << 20), async_op=True) for _ in range(4)]
    raise RuntimeError("boom")
''')
for way in ("end", "exit", "hook", "under way"):
    child = os.fork()
    if not child:
        break
    print(way, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
os.dup2(1, 2)
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
telemetry = os.path.join(folder, way.replace(" ", "-"))
sys.argv[:] = ["holmes", script, way, "--holmes", "--holmes-telemetry", telemetry]
sys.exit(holmes.main())
"""


@pytest.mark.full(share=4)
def test_a_job_that_dies_ends_with_its_own_status():
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    statuses = dict(line.rsplit(" ", 1) for line in result.stdout.splitlines())
    assert statuses == {
        "end": "0",
        "exit": "3",
        "hook": "1",
        "under way": "1",
    }, result.stderr
