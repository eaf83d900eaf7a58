"""Train a small byte-level GPT as a pipeline of torch.distributed.pipelining, its stages in
DistributedDataParallel.

    torchrun --nproc-per-node 2 train.py --pipeline 2                                   two stages, 1F1B
    torchrun --nproc-per-node 4 train.py --pipeline 2 --schedule LoopedBFS --chunks 2   two replicas of each

--data-parallel fsdp shards each stage over its replicas (fully_shard) in place of DistributedDataParallel,
which knows nothing of the separate weight gradients of InterleavedZeroBubble. Nothing here knows of holmes:
the same commands with --holmes behind the script run it over clusters with different NICs. NCCL on GPUs, gloo
on CPUs.
"""

import argparse
import inspect
import json
import os
import time
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")


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


class Embedding(nn.Module):
    """int64 [batch, sequence] -> [batch, sequence, hidden]."""

    def __init__(self, hidden: int, sequence: int):
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, hidden), nn.Embedding(sequence, hidden)

    def forward(self, tokens):
        return self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]


def stage_module(index: int, stages: int, args: argparse.Namespace) -> nn.Module:
    """Layers of one stage of the model: the same initial weights wherever the model is cut."""
    first, after = (args.layers * stage_link // stages for stage_link in (index, index + 1))
    parts = []
    for layer in range(first, after):
        torch.manual_seed(args.seed * 1000 + layer)
        parts.append(Block(args.hidden, args.heads))
    torch.manual_seed(args.seed * 1000 + 999)
    if index == 0:
        parts.insert(0, Embedding(args.hidden, args.sequence))
    if index == stages - 1:
        parts += [nn.LayerNorm(args.hidden), nn.Linear(args.hidden, 256, bias=False)]
    return nn.Sequential(*parts)


def make_stage(
    index: int, stages: int, args: argparse.Namespace, device: torch.device, mesh
) -> PipelineStage:
    module = stage_module(index, stages, args).to(device)
    data = mesh["dp"]
    if data.size() > 1 and args.data_parallel == "fsdp":
        module = fully_shard(module, mesh=data)
    elif data.size() > 1:
        alone = args.data_parallel == "alone"
        group = (
            dist.new_group([dist.get_rank()], use_local_synchronization=True)
            if alone
            else data.get_group()
        )
        module = DistributedDataParallel(module, process_group=group)
    # Messages' shapes are given: torch 2.13 otherwise runs the stage once to see them, in which
    # DistributedDataParallel prepares for a backward that does not come, and ends with an internal error in
    # the second step.
    tokens = torch.empty(args.micro_batch, args.sequence, dtype=torch.int64, device=device)
    hidden = torch.empty(*tokens.shape, args.hidden, device=device, requires_grad=True)
    logits = torch.empty(*tokens.shape, 256, device=device, requires_grad=True)
    given = {
        "input_args": hidden if index else tokens,
        "output_args": hidden if index < stages - 1 else logits,
    }
    return PipelineStage(module, index, stages, device, group=mesh["pp"].get_group(), **given)


def batch(text: torch.Tensor, args: argparse.Namespace, number: int, device: torch.device):
    """Inputs and labels, batch `number` of the whole job: different for every replica, the same in every
    run."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + number)
    samples = args.micro_batch * args.micro_batches
    starts = torch.randint(len(text) - args.sequence - 1, (samples,), generator=generator)
    rows = (
        torch.stack([text[start : start + args.sequence + 1] for start in starts]).long().to(device)
    )
    # of a stride that torch up to 2.12 expects of a stage's inputs
    return rows[:, :-1].contiguous(), rows[:, 1:]


def cross_entropy(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--pipeline",
        type=int,
        default=2,
        help="ranks of a pipeline; pipelines are data-parallel replicas",
    )
    add("--schedule", choices=SCHEDULES, default="1F1B")
    add("--chunks", type=int, default=1, help="stages of each rank (1 with GPipe and 1F1B)")
    add(
        "--data-parallel",
        choices=("ddp", "fsdp", "alone"),
        default="ddp",
        help="alone: each rank is a DistributedDataParallel group by itself, so gradients are not reduced "
        "between replicas",
    )
    add(
        "--mesh",
        default="pp,dp",
        choices=("pp,dp", "dp,pp"),
        help="dimensions of the device mesh, outermost first",
    )
    add("--steps", type=int, default=50)
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--sequence", type=int, default=128)
    add("--micro-batch", type=int, default=2, help="samples in a micro-batch")
    add("--micro-batches", type=int, default=4, help="micro-batches in a step")
    add("--lr", type=float, default=1e-3)
    add("--seed", type=int, default=1)
    add("--log-file", help="write a JSON line for each step into this file")
    add("--save", metavar="FOLDER", help="save a checkpoint into this folder")
    add(
        "--save-after", type=int, metavar="STEP", help="save it after this step (default: the last)"
    )
    add(
        "--load",
        metavar="FOLDER",
        help="resume from the checkpoint in this folder, with as many stages and the same --data-parallel",
    )
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
    replicas = dist.get_world_size() // args.pipeline
    sizes = {"pp": args.pipeline, "dp": replicas}
    names = tuple(args.mesh.split(","))
    mesh = init_device_mesh(kind, tuple(sizes[name] for name in names), mesh_dim_names=names)
    replica, place = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")

    schedule_class = get_schedule_class(args.schedule)
    single = issubclass(schedule_class, PipelineScheduleSingle)
    count = args.pipeline * args.chunks
    stages = [
        make_stage(index, count, args, device, mesh) for index in range(place, count, args.pipeline)
    ]
    schedule = schedule_class(
        stages[0] if single else stages, args.micro_batches, loss_fn=cross_entropy
    )
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr)
    # a checkpoint has the stages' weights under the stages' numbers
    numbered = nn.ModuleDict({f"stage{stage.stage_index}": stage.submod for stage in stages})
    # and the optimizer's entries under their names: each rank has only some of the parameters
    by_name = StateDictOptions(flatten_optimizer_state_dict=True)
    first = 0
    if args.load:
        weights, moments = get_state_dict(numbered, optimizer, options=by_name)
        state = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, checkpoint_id=args.load)
        set_state_dict(
            numbered,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=by_name,
        )
        first = state["step"]

    text = torch.frombuffer(
        bytearray("\n\n".join(topics[name] for name in sorted(topics)), "utf-8"), dtype=torch.uint8
    )
    log = open(args.log_file, "w") if args.log_file and dist.get_rank() == 0 else None
    # torch 2.9 and older have no such argument, and always return the last stage's outputs
    known = inspect.signature(schedule.step).parameters
    no_outputs = {"return_outputs": False} if "return_outputs" in known else {}
    for step in range(first, args.steps):
        begin, losses = time.perf_counter(), []
        inputs, labels = batch(text, args, step * replicas + replica, device)
        given = {"target": labels, "losses": losses} if stages[-1].is_last else {}
        schedule.step(*([inputs] if stages[0].is_first else []), **given, **no_outputs)
        optimizer.step()
        optimizer.zero_grad()
        total = (
            torch.stack(losses).mean().detach() / replicas
            if losses
            else torch.zeros((), device=device)
        )
        dist.all_reduce(total)
        seconds = time.perf_counter() - begin
        if dist.get_rank() == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step + 1}: loss {total:.4f}, {seconds:.3f} s", flush=True)
        if log:
            print(
                json.dumps({"step": step + 1, "loss": total.item(), "seconds": seconds}),
                file=log,
                flush=True,
            )
        if args.save and step + 1 == (args.save_after or args.steps):
            weights, moments = get_state_dict(numbered, optimizer, options=by_name)
            state = {"model": weights, "optimizer": moments, "step": step + 1}
            dcp.save(state, checkpoint_id=args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
