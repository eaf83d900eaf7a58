"""Trains a DeepSpeed pipeline, one of whose micro-batches is shorter than the others.

    shorter_batch.py STEP MICRO_BATCH FLAGS     two stages x two data-parallel ranks

STEP and MICRO_BATCH, counted from 0, select the shorter micro-batch.
"""

import contextlib
import io
import os
import sys

os.environ.setdefault("LOCAL_SIZE", "1")

import deepspeed  # noqa: E402
import torch  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule  # noqa: E402
from torch import nn  # noqa: E402

STEP, MICRO_BATCH = map(int, sys.argv[1:3])
MICRO_BATCHES = 4

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
with contextlib.redirect_stdout(io.StringIO()):
    model = PipelineModule(
        [LayerSpec(nn.Linear, 8, 8) for _ in range(4)], num_stages=2, loss_fn=nn.functional.mse_loss
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "steps_per_print": 10**9,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        },
    )


def data():
    """Yield micro-batches of 4 rows, one of which has 3."""
    for number in range(10**6):
        rows = 3 if number == STEP * MICRO_BATCHES + MICRO_BATCH else 4
        yield torch.ones(rows, 8), torch.ones(rows, 8)


batches = data()
for _ in range(STEP + 2):
    engine.train_batch(batches)
