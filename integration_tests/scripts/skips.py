"""A pipeline of torch.distributed.pipelining, traced from a model with a skip connection.

    skips.py LOG

The last stage uses the result of stage 0 again. torchrun's environment variables must be set. LOG gets a
JSON line with the loss of each batch. There are four stages, one on each rank. Only the forward pass runs,
as torch 2.13 refuses the backward pass ("Backward of skip connections not supported yet"). The backend is
NCCL on GPUs, gloo on CPUs.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

STEPS = 4
WIDTH = 64
ROWS = 16  # of a batch
MICRO_BATCHES = 4


class Skips(nn.Module):
    """A model whose last layer adds the output of the first one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        first = torch.tanh(self.parts[0](x))
        middle = torch.tanh(self.parts[2](torch.tanh(self.parts[1](first))))
        return self.parts[3](middle + first)


def main(log: str) -> None:
    """Run the pipeline, and write the losses."""
    torch.set_num_threads(1)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group()
    rank = dist.get_rank()
    stages = dist.get_world_size()
    traced = pipeline(
        Skips(),
        mb_args=(torch.zeros(ROWS // MICRO_BATCHES, WIDTH),),
        split_spec={f"parts.{index}": SplitPoint.BEGINNING for index in range(1, stages)},
    )
    stage = traced.build_stage(rank, device, dist.new_group(list(range(stages))))
    stage.submod.to(device)
    schedule = ScheduleGPipe(stage, MICRO_BATCHES)
    losses = []
    for step in range(STEPS):
        x, y = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
        with torch.no_grad():
            result = schedule.step(*([x] if rank == 0 else []))
        loss = torch.zeros((), device=device)
        if rank == stages - 1:
            loss = nn.functional.mse_loss(result, y)
        dist.all_reduce(loss)  # only the last stage has a loss
        losses.append(loss.item())
    if rank == 0:
        with open(log, "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"loss": loss}) + "\n" for loss in losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
