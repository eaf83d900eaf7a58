"""Plain torch steps on every rank: an all-reduce in the data group (two ranks of a cluster), a message to the
next stage, an optimizer step.

    steps.py STEPS     prints "step N" on rank 0 before every tenth;
                       with --holmes ranks 0, 1 and 2, 3 share a cluster
"""

import os
import sys
import time

import torch
import torch.distributed as dist


def main(steps: int) -> None:
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    torch.set_default_device("cuda" if on_gpu else "cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    data = [dist.new_group(ranks) for ranks in ((0, 1), (2, 3))][rank // 2]
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
        if on_gpu:  # as a loss that is read does
            torch.cuda.synchronize()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
