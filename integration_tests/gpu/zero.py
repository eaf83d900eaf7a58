"""A DeepSpeed script without holmes: trains a small model with ZeRO stage 0 to 3 on GPUs or CPUs.

    zero.py --stage N [--steps N] [--save DIR --save-after STEP] [--load DIR]

torchrun's environment variables (RANK, WORLD_SIZE, ...) must be set. At its end each rank prints a JSON line
with the loss of each step, averaged over all ranks. The backend is NCCL on GPUs and gloo on CPUs.
"""

import argparse
import json
import os

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

ROWS = 8  # tokens of a rank in each step
WIDTH = 32


def model() -> torch.nn.Module:
    """Return a small model with the same weights on all ranks."""
    torch.manual_seed(5)
    layers = [torch.nn.Embedding(64, WIDTH)]
    for _ in range(4):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 64))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=0, help="ZeRO stage")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--save", help="folder of the checkpoint that is written")
    parser.add_argument("--save-after", type=int, default=0, help="step after which it is written")
    parser.add_argument("--load", help="folder of the checkpoint from which training continues")
    arguments = parser.parse_args()
    device = get_accelerator()
    if device.device_name() == "cpu":
        # DeepSpeed would compile this operator for half a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        device.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    rank = deepspeed.comm.get_rank()
    world = deepspeed.comm.get_world_size()
    # The buckets have so few elements that each step reduces several of them.
    zero = {"stage": arguments.stage, "reduce_bucket_size": 2000, "allgather_bucket_size": 2000}
    engine, *_ = deepspeed.initialize(
        model=model(),
        config={
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": zero,
        },
    )
    if arguments.load:
        engine.load_checkpoint(arguments.load)
    losses = []
    for step in range(engine.global_steps, arguments.steps):
        # All ranks draw the same batch, and each trains on its own part.
        batch = torch.randint(0, 64, (world, ROWS), generator=torch.Generator().manual_seed(step))
        tokens = batch[rank].to(engine.device)
        # The model learns to return each token itself.
        loss = torch.nn.functional.cross_entropy(engine(tokens).float(), tokens)
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / world)
        if arguments.save and engine.global_steps == arguments.save_after:
            engine.save_checkpoint(arguments.save)
    print(json.dumps({"rank": rank, "losses": losses}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
