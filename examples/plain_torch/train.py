"""Train a small byte-level GPT with a plain torch loop, data-parallel, gradients averaged by
holmes_ext.GradientReducer.

    torchrun --nproc-per-node 4 train.py                     on one machine
    torchrun ... train.py --holmes --holmes-cluster FILE     on clusters with different NICs

No wrapper around the model, no engine: three lines are marked with "holmes". NCCL on GPUs, gloo on CPUs.
"""

import argparse
import json
import os
import statistics
import time
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from holmes_ext import GradientReducer  # holmes


class Block(nn.Module):
    """A pre-norm transformer block with causal self-attention: [batch, sequence, hidden] -> the same."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.attention_out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp_in, self.mlp_out = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        batch, sequence, hidden = x.shape
        q, k, v = (
            self.qkv(self.attention_norm(x))
            .view(batch, sequence, 3, self.heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        attended = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(batch, sequence, hidden)
        )
        x = x + self.attention_out(attended)
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """int64 [batch, sequence] -> logits of the next byte [batch, sequence, 256]; the head shares the
    embedding's weight."""

    def __init__(self, layers: int, hidden: int, heads: int, sequence: int):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, hidden), nn.Embedding(sequence, hidden)
        nn.init.normal_(self.embedding.weight, std=0.02)  # it is the head too
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


def micro_batch(text: torch.Tensor, args: argparse.Namespace, number: int, device: torch.device):
    """Inputs and labels of micro-batch `number` of the whole job: different on every rank, the same in every
    run."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + number)
    starts = torch.randint(len(text) - args.sequence - 1, (args.micro_batch,), generator=generator)
    rows = (
        torch.stack([text[start : start + args.sequence + 1] for start in starts]).long().to(device)
    )
    return rows[:, :-1], rows[:, 1:]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=50)
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--sequence", type=int, default=128)
    add("--micro-batch", type=int, default=4, help="samples in a micro-batch of one rank")
    add(
        "--micro-batches",
        type=int,
        default=2,
        help="micro-batches in a step (gradient accumulation)",
    )
    add("--lr", type=float, default=1e-3)
    add("--seed", type=int, default=1)
    add(
        "--bucket-mb",
        type=float,
        help="megabytes in a bucket of gradients (default: chosen for the fabric, or 25 MiB)",
    )
    add(
        "--no-overlap",
        action="store_true",
        help="reduce after the backward pass, to see what overlapping gains",
    )
    add("--log-file", help="a JSON line for each step")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    gpu = torch.accelerator.is_available()
    device = (
        torch.device(torch.accelerator.current_accelerator().type, int(os.environ["LOCAL_RANK"]))
        if gpu
        else torch.device("cpu")
    )
    if gpu:
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()

    text = torch.frombuffer(
        bytearray("\n\n".join(topics[name] for name in sorted(topics)), "utf-8"), dtype=torch.uint8
    )
    torch.manual_seed(args.seed)  # the same initial weights everywhere
    model = GPT(args.layers, args.hidden, args.heads, args.sequence).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    size = args.bucket_mb and round(args.bucket_mb * 1e6)
    reducer = GradientReducer(model.named_parameters(), bucket_bytes=size)  # holmes

    log = open(args.log_file, "w") if args.log_file and rank == 0 else None
    seconds = []
    for step in range(args.steps):
        begin = time.perf_counter()
        total = torch.zeros((), device=device)
        for part in range(args.micro_batches):
            inputs, labels = micro_batch(
                text, args, (step * args.micro_batches + part) * ranks + rank, device
            )
            loss = (
                F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()) / args.micro_batches
            )
            if part == args.micro_batches - 1 and not args.no_overlap:
                reducer.arm()  # the last backward of the step: send gradients as they become final
            loss.backward()
            total += loss.detach()
        times = reducer.finish()  # holmes: gradients are the averages now
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        seconds.append(time.perf_counter() - begin)
        if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(
                f"step {step + 1}: loss {total / ranks:.4f}, {seconds[-1]:.3f} s, of which "
                f"{times.exposed_s:.3f} s waiting for {times.bytes / 1e6:.1f} MB of gradients",
                flush=True,
            )
        if log:
            line = {
                "step": step + 1,
                "loss": (total / ranks).item(),
                "seconds": seconds[-1],
                "exposed_s": times.exposed_s,
            }
            print(json.dumps({**line, "reduction_s": times.seconds}), file=log, flush=True)
    if rank == 0:
        print(f"median step {statistics.median(seconds):.4f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
