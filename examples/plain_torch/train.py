"""Train a small byte-level GPT with a plain torch loop, data-parallel.

holmes_ext.GradientReducer averages the gradients over the ranks.

    torchrun --nproc-per-node 4 train.py                     on one machine
    torchrun ... train.py --holmes --holmes-cluster FILE     on clusters with different NICs

There is no wrapper around the model, and no engine. Three lines use holmes; they have the comment "holmes".
Groups use NCCL on GPUs and gloo on CPUs.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from holmes_ext import GradientReducer  # holmes


class Block(nn.Module):
    """Pre-norm transformer block with causal self-attention.

    Input and output have the shape [batch, sequence, hidden].
    """

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)  # queries, keys and values
        self.attention_out = nn.Linear(hidden, hidden)
        self.mlp_in = nn.Linear(hidden, 4 * hidden)
        self.mlp_out = nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        batch, sequence, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, sequence, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, sequence, hidden of a head]
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """Byte-level GPT: int64 tokens [batch, sequence] -> logits of the next byte [..., 256].

    The head shares the embedding's weight.
    """

    def __init__(self, layers: int, hidden: int, heads: int, sequence: int):
        super().__init__()
        self.embedding = nn.Embedding(256, hidden)
        self.positions = nn.Embedding(sequence, hidden)
        nn.init.normal_(
            self.embedding.weight, std=0.02
        )  # small, since it is also the head's weight
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.embedding.weight)


def load_text() -> torch.Tensor:
    """Return the documentation that Python's help() prints, as bytes: uint8, one dimension."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)


def micro_batch(text: torch.Tensor, args: argparse.Namespace, number: int, device: torch.device):
    """Return inputs and labels of a micro-batch: int64 tensors [samples, sequence].

    Args:
        text: The training text, as bytes.
        args: The script's options.
        number: Number of the micro-batch in the whole job. It decides, with the seed, which samples are
            returned, so they differ on every rank, and are the same in every run.
        device: Device of the returned tensors.
    """
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + number)
    starts = torch.randint(len(text) - args.sequence - 1, (args.micro_batch,), generator=generator)
    rows = torch.stack([text[start : start + args.sequence + 1] for start in starts])
    rows = rows.long().to(device)
    return rows[:, :-1], rows[:, 1:]  # a label is the byte that follows its input


def parse_args() -> argparse.Namespace:
    """Parse the command line.

    By default, gradients are reduced in buckets while the backward pass still runs. --no-overlap
    reduces them after it, to measure how much time the overlap saves.
    """
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
    add("--log-file", help="write a JSON line for each step into this file")
    return parser.parse_args()


def choose_device() -> torch.device:
    """Return this process's GPU, or the CPU if there is none."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    device_type = torch.accelerator.current_accelerator().type
    device = torch.device(device_type, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device.index)
    return device


def main() -> None:
    args = parse_args()
    device = choose_device()
    dist.init_process_group()
    rank = dist.get_rank()
    ranks = dist.get_world_size()

    text = load_text()
    torch.manual_seed(args.seed)  # the same initial weights everywhere
    model = GPT(args.layers, args.hidden, args.heads, args.sequence).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    bucket_bytes = args.bucket_mb and round(args.bucket_mb * 1e6)
    reducer = GradientReducer(model.named_parameters(), bucket_bytes=bucket_bytes)  # holmes

    writes_log = args.log_file and rank == 0
    if writes_log:
        Path(args.log_file).write_text("")
    seconds = []
    for step in range(args.steps):
        begin = time.perf_counter()
        total = torch.zeros((), device=device)
        for part in range(args.micro_batches):
            number = (step * args.micro_batches + part) * ranks + rank
            inputs, labels = micro_batch(text, args, number, device)
            logits = model(inputs)
            loss = (
                functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
                / args.micro_batches
            )
            if part == args.micro_batches - 1 and not args.no_overlap:
                reducer.arm()  # the last backward pass of the step reduces gradients as they become final
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
        if writes_log:
            line = {
                "step": step + 1,
                "loss": (total / ranks).item(),
                "seconds": seconds[-1],
                "exposed_s": times.exposed_s,
                "reduction_s": times.seconds,
            }
            with open(args.log_file, "a") as log:
                print(json.dumps(line), file=log)
    if rank == 0:
        print(f"median step {statistics.median(seconds):.4f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
