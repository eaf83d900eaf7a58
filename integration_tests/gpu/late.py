"""Training steps in a group with a timeout of 12 s, in one of which rank 1 is late.

late.py SECONDS     rank 1 sleeps for this long before the sixth of 8 steps
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

STEPS = 8
LATE_STEP = 5  # counted from 0

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group(timeout=timedelta(seconds=12))
net = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(STEPS):
    if step == LATE_STEP and dist.get_rank() == 1:
        time.sleep(float(sys.argv[1]))
    net(torch.ones(2, 64, device="cuda")).sum().backward()
    dist.all_reduce(net.weight.grad)
    torch.cuda.synchronize()
    optimizer.step()
    optimizer.zero_grad()
print("done", flush=True)
dist.destroy_process_group()
