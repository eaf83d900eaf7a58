"""Training steps in plain torch: an all-reduce, a message to the next stage, an optimizer step.

    steps.py STEPS     rank 0 prints "step N" before every tenth step

The all-reduce is in the data-parallel group, ranks 0 and 1 or ranks 2 and 3. With --holmes, these ranks
share a cluster.
"""

import os
import sys
import time

import torch
import torch.distributed as dist


def main(steps: int) -> None:
    """Train for this number of steps."""
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    torch.set_default_device("cuda" if on_gpu else "cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    first_group = dist.new_group((0, 1))
    second_group = dist.new_group((2, 3))
    data = first_group if rank < 2 else second_group
    net = torch.nn.Linear(4000, 1000)  # 16 MB
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    message = torch.ones(25_000)
    for step in range(steps):
        if rank == 0 and step % 10 == 0:
            os.write(1, f"step {step}\n".encode())
        time.sleep(0.02)
        if rank < 2:
            dist.send(message, rank + 2)
        else:
            dist.recv(message, rank - 2)
        net(torch.ones(2, 4000)).sum().backward()
        dist.all_reduce(net.weight.grad, group=data)
        dist.all_reduce(net.bias.grad, group=data, async_op=True).wait()
        optimizer.step()
        if on_gpu:  # as in a script that reads the loss of each step
            torch.cuda.synchronize()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
