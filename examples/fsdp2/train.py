"""Train a small byte-level GPT with FSDP2.

The weights, gradients and optimizer state of every block are sharded over the ranks:

    torchrun --nproc-per-node 2 train.py               one dimension: sharded over all ranks
    torchrun --nproc-per-node 4 train.py --replicas 2  HSDP: two replicas, each sharded over half of the ranks

The script does not use holmes itself. With --holmes after the script's name, the same commands run over
clusters with different NICs; --holmes-fsdp hybrid then keeps the shards of the first command inside clusters.
Groups use NCCL on GPUs and gloo on CPUs.
"""

import argparse
import json
import os
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional


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
        x = x + self.attention_out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """Byte-level GPT: int64 tokens [batch, sequence] -> logits of the next byte [..., 256]."""

    def __init__(self, layers: int, hidden: int, heads: int, sequence: int):
        super().__init__()
        self.embedding = nn.Embedding(256, hidden)
        self.positions = nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, 256, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def load_text() -> torch.Tensor:
    """Return the documentation that Python's help() prints, as bytes: uint8, one dimension."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)


def samples(text: torch.Tensor, args: argparse.Namespace, number: int, device: torch.device):
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


def arguments() -> argparse.Namespace:
    """Parse the command line. With --replicas above 1, FSDP shards only within a replica (HSDP)."""
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
        default=1,
        help="micro-batches in a step (gradient accumulation)",
    )
    add(
        "--replicas",
        type=int,
        default=1,
        help="copies of the sharded model; above 1: a 2-D mesh (replicas, ranks of a replica)",
    )
    add("--lr", type=float, default=1e-3)
    add("--seed", type=int, default=1)
    add("--log-file", help="write a JSON line for each step into this file")
    add("--save", metavar="FOLDER", help="save a checkpoint into this folder")
    add(
        "--save-after", type=int, metavar="STEP", help="save it after this step (default: the last)"
    )
    add("--load", metavar="FOLDER", help="resume from the checkpoint in this folder")
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
    args = arguments()
    device = choose_device()
    dist.init_process_group()
    rank = dist.get_rank()
    ranks = dist.get_world_size()

    text = load_text()
    torch.manual_seed(args.seed)  # the same initial weights everywhere
    model = GPT(args.layers, args.hidden, args.heads, args.sequence).to(device)
    mesh_shape = (args.replicas, ranks // args.replicas)
    mesh = init_device_mesh(device.type, mesh_shape, mesh_dim_names=("replicate", "shard"))
    if args.replicas == 1:
        mesh = mesh["shard"]
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    first = 0
    if args.load:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, checkpoint_id=args.load)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        first = state["step"]

    writes_log = args.log_file and rank == 0
    if writes_log:
        Path(args.log_file).write_text("")
    for step in range(first, args.steps):
        begin = time.perf_counter()
        total = torch.zeros((), device=device)
        for micro_batch in range(args.micro_batches):
            # Gradients are reduced in the last backward pass of a step only.
            model.set_requires_gradient_sync(micro_batch == args.micro_batches - 1)
            number = (step * args.micro_batches + micro_batch) * ranks + rank
            inputs, labels = samples(text, args, number, device)
            logits = model(inputs)
            loss = (
                functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
                / args.micro_batches
            )
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        seconds = time.perf_counter() - begin
        if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step + 1}: loss {total / ranks:.4f}, {seconds:.3f} s", flush=True)
        if writes_log:
            line = {"step": step + 1, "loss": (total / ranks).item(), "seconds": seconds}
            with open(args.log_file, "a") as log:
                print(json.dumps(line), file=log)
        if args.save and step + 1 == (args.save_after or args.steps):
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "step": step + 1}
            dcp.save(state, checkpoint_id=args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
