"""A training loop on Hugging Face's Accelerate, which knows nothing of holmes.

    accelerate launch accelerate_loop.py --log-file FILE [--save DIR --save-after STEP] [--load DIR]
"""

import argparse
import json

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, ROWS, MICRO_BATCHES = 64, 4, 2


def main() -> nn.Module:
    """Train, and return the model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--log-file", required=True)
    parser.add_argument("--save", help="folder of the checkpoint")
    parser.add_argument("--save-after", type=int, default=0, help="step after which it is saved")
    parser.add_argument("--load", help="folder of the checkpoint to go on from")
    args = parser.parse_args()

    cpu = not torch.accelerator.is_available()
    accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=MICRO_BATCHES)
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    model = nn.Sequential(*layers)
    rows = torch.randn(ROWS * MICRO_BATCHES * 100, WIDTH)
    # AdamW's steps would be the same with gradients that are wrong by a factor.
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    loader = DataLoader(TensorDataset(rows), batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done = 0
    if args.load:
        accelerator.load_state(args.load)
        done = args.save_after
    batches = iter(accelerator.skip_first_batches(loader, done * MICRO_BATCHES))
    log = open(args.log_file, "w") if accelerator.is_main_process else None
    for step in range(done + 1, args.steps + 1):
        losses = []
        for _ in range(MICRO_BATCHES):
            (batch,) = next(batches)
            with accelerator.accumulate(model):
                loss = (model(batch) - batch.roll(1, dims=1)).square().mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        mean = accelerator.reduce(torch.stack(losses).mean(), reduction="mean")
        if log:
            print(json.dumps({"step": step, "loss": mean.item()}), file=log, flush=True)
        if args.save and step == args.save_after:
            accelerator.save_state(args.save)
    accelerator.end_training()
    return model


if __name__ == "__main__":
    trained = main()  # lives as long as the process, for the reason in train.py
