"""A traced pipeline of torch.distributed.pipelining with skip connections: stage 0's result is used again by
the last.

    skips.py LOG        torchrun's variables say which rank; LOG: a JSON line with the loss of each batch

Four stages, one on each rank; forward only, as torch 2.13 refuses the backward pass ("Backward of skip
connections not supported yet"). NCCL on GPUs, gloo on CPUs.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

STEPS, WIDTH, ROWS, MICRO_BATCHES = 4, 64, 16, 4


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        first = torch.tanh(self.parts[0](x))
        middle = torch.tanh(self.parts[2](torch.tanh(self.parts[1](first))))
        return self.parts[3](middle + first)


def main(log: str) -> None:
    torch.set_num_threads(1)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group()
    rank, stages = dist.get_rank(), dist.get_world_size()
    traced = pipeline(
        Skips(),
        mb_args=(torch.zeros(ROWS // MICRO_BATCHES, WIDTH),),
        split_spec={f"parts.{index}": SplitPoint.BEGINNING for index in range(1, stages)},
    )
    stage = traced.build_stage(rank, device, dist.new_group(list(range(stages))))
    stage.submod.to(device)
    schedule = ScheduleGPipe(stage, MICRO_BATCHES)
    found = []
    for step in range(STEPS):
        x, y = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
        with torch.no_grad():
            result = schedule.step(*([x] if rank == 0 else []))
        total = (
            nn.functional.mse_loss(result, y)
            if rank == stages - 1
            else torch.zeros((), device=device)
        )
        dist.all_reduce(total)
        found.append(total.item())
    if rank == 0:
        with open(log, "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"loss": loss}) + "\n" for loss in found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
