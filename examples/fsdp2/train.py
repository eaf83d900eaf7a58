"""Train a small byte-level GPT with FSDP2: every block's weights, gradients and moments are sharded over the
ranks.

    torchrun --nproc-per-node 2 train.py               one dimension: sharded over all ranks
    torchrun --nproc-per-node 4 train.py --replicas 2  HSDP: two replicas, each sharded over half of the ranks

Nothing here knows of holmes: the same commands with --holmes behind the script run it over clusters with
different NICs, and --holmes-fsdp hybrid keeps the shards of the first inside clusters. NCCL on GPUs, gloo on
CPUs.
"""

import argparse
import json
import os
import time
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


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
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        )
        x = x + self.attention_out(attended)
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """int64 [batch, sequence] -> logits of the next byte [batch, sequence, 256]."""

    def __init__(self, layers: int, hidden: int, heads: int, sequence: int):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, hidden), nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, 256, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def samples(text: torch.Tensor, args: argparse.Namespace, number: int, device: torch.device):
    """Inputs and labels of micro-batch `number` of the whole job: different on every rank, the same in every
    run."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + number)
    starts = torch.randint(len(text) - args.sequence - 1, (args.micro_batch,), generator=generator)
    rows = (
        torch.stack([text[start : start + args.sequence + 1] for start in starts]).long().to(device)
    )
    return rows[:, :-1], rows[:, 1:]


def arguments() -> argparse.Namespace:
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


def main() -> None:
    args = arguments()
    kind = (
        torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    )
    device = (
        torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind != "cpu" else torch.device(kind)
    )
    if kind != "cpu":
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()

    text = torch.frombuffer(
        bytearray("\n\n".join(topics[name] for name in sorted(topics)), "utf-8"), dtype=torch.uint8
    )
    torch.manual_seed(args.seed)  # the same initial weights everywhere
    model = GPT(args.layers, args.hidden, args.heads, args.sequence).to(device)
    names = ("replicate", "shard")
    mesh = init_device_mesh(kind, (args.replicas, ranks // args.replicas), mesh_dim_names=names)
    mesh = mesh if args.replicas > 1 else mesh["shard"]
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

    log = open(args.log_file, "w") if args.log_file and rank == 0 else None
    for step in range(first, args.steps):
        begin = time.perf_counter()
        total = torch.zeros((), device=device)
        for part in range(args.micro_batches):
            model.set_requires_gradient_sync(part == args.micro_batches - 1)
            inputs, labels = samples(
                text, args, (step * args.micro_batches + part) * ranks + rank, device
            )
            loss = (
                F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()) / args.micro_batches
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
        if log:
            line = {"step": step + 1, "loss": (total / ranks).item(), "seconds": seconds}
            print(json.dumps(line), file=log, flush=True)
        if args.save and step + 1 == (args.save_after or args.steps):
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "step": step + 1}
            dcp.save(state, checkpoint_id=args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
