"""Trains a small model with Hugging Face's Accelerate, and logs the loss of each step.

    accelerate launch accelerate_loop.py --log-file FILE [--save DIR --save-after STEP]
    accelerate launch accelerate_loop.py --log-file FILE --load DIR --save-after STEP

The first form trains from step 1, and can save a checkpoint after STEP. The second form resumes from
such a checkpoint. The main process writes a JSON line with the mean loss of each step to FILE.
"""

import argparse
import json

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 64  # features of every layer
ROWS = 4  # of a micro-batch
MICRO_BATCHES = 2  # whose gradients a step accumulates


def main() -> nn.Module:
    """Train the model, write the loss of each step to the log file, and return the model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--log-file", required=True)
    parser.add_argument("--save", help="folder of the checkpoint")
    parser.add_argument("--save-after", type=int, default=0, help="step after which it is saved")
    parser.add_argument("--load", help="folder of the checkpoint to resume from")
    args = parser.parse_args()

    on_cpu = not torch.accelerator.is_available()
    accelerator = Accelerator(cpu=on_cpu, gradient_accumulation_steps=MICRO_BATCHES)
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    model = nn.Sequential(*layers)
    rows = torch.randn(ROWS * MICRO_BATCHES * 100, WIDTH)  # for 100 steps of one rank
    # Not AdamW: its steps do not change if all gradients are wrong by the same factor.
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    loader = DataLoader(TensorDataset(rows), batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    steps_done = 0
    if args.load:
        accelerator.load_state(args.load)
        steps_done = args.save_after  # the checkpoint was saved after this step
    micro_batches = iter(accelerator.skip_first_batches(loader, steps_done * MICRO_BATCHES))
    log = None
    if accelerator.is_main_process:
        log = open(args.log_file, "w")  # noqa: SIM115 - open until the process ends

    for step in range(steps_done + 1, args.steps + 1):
        losses = []
        for _ in range(MICRO_BATCHES):
            (batch,) = next(micro_batches)
            with accelerator.accumulate(model):
                loss = (model(batch) - batch.roll(1, dims=1)).square().mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()  # has no effect before the last micro-batch of a step
                optimizer.zero_grad()
            losses.append(loss.detach())
        mean_loss = accelerator.reduce(torch.stack(losses).mean(), reduction="mean")
        if log:
            line = {"step": step, "loss": mean_loss.item()}
            print(json.dumps(line), file=log, flush=True)
        if args.save and step == args.save_after:
            accelerator.save_state(args.save)
    accelerator.end_training()
    return model


if __name__ == "__main__":
    # The variable keeps the model alive until the process ends, for the reason given in train.py.
    trained_model = main()
