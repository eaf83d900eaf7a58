"""Train a small byte-level GPT as a pipeline of torch.distributed.pipelining.

    torchrun --nproc-per-node 2 train.py --pipeline 2                                   two stages, 1F1B
    torchrun --nproc-per-node 4 train.py --pipeline 2 --schedule LoopedBFS --chunks 2   two replicas of each

Each stage is in DistributedDataParallel. --data-parallel fsdp shards each stage over its replicas instead
(fully_shard). InterleavedZeroBubble needs this, because DistributedDataParallel does not reduce weight
gradients that are computed in separate passes.

The script does not use holmes itself. With --holmes after the script's name, the same commands run over
clusters with different NICs. Groups use NCCL on GPUs and gloo on CPUs.
"""

import argparse
import inspect
import json
import os
import time
from pathlib import Path
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
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")


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


class Embedding(nn.Module):
    """Embedding of bytes and positions: int64 [batch, sequence] -> [batch, sequence, hidden]."""

    def __init__(self, hidden: int, sequence: int):
        super().__init__()
        self.bytes = nn.Embedding(256, hidden)
        self.positions = nn.Embedding(sequence, hidden)

    def forward(self, tokens):
        return self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]


def stage_module(index: int, stages: int, args: argparse.Namespace) -> nn.Module:
    """Return the layers of one stage of the model.

    A layer has the same initial weights for every number of stages.

    Args:
        index: Number of the stage.
        stages: Number of stages.
        args: The script's options.
    """
    first_layer = args.layers * index // stages
    first_layer_of_next = args.layers * (index + 1) // stages
    parts = []
    for layer in range(first_layer, first_layer_of_next):
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
    """Return a stage of the pipeline, in DistributedDataParallel or FSDP if it has replicas.

    Args:
        index: Number of the stage.
        stages: Number of stages.
        args: The script's options. args.data_parallel "alone" is for measurements: each replica
            trains without the others, so that a step has no gradient reductions between ranks.
        device: Device of the stage.
        mesh: The device mesh, with the dimensions "pp" and "dp".
    """
    module = stage_module(index, stages, args).to(device)
    data = mesh["dp"]
    if data.size() > 1 and args.data_parallel == "fsdp":
        module = fully_shard(module, mesh=data)
    elif data.size() > 1:
        if args.data_parallel == "alone":
            # A group with this rank alone: DistributedDataParallel then sends nothing.
            group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        else:
            group = data.get_group()
        module = DistributedDataParallel(module, process_group=group)
    # The shapes of messages are given. Otherwise torch 2.13 runs the stage once to find them out:
    # DistributedDataParallel then prepares for a backward pass that does not follow, and raises an internal
    # error in the second step.
    tokens = torch.empty(args.micro_batch, args.sequence, dtype=torch.int64, device=device)
    hidden = torch.empty(*tokens.shape, args.hidden, device=device, requires_grad=True)
    # 256: the vocabulary, all values of a byte.
    logits = torch.empty(*tokens.shape, 256, device=device, requires_grad=True)
    return PipelineStage(
        module,
        index,
        stages,
        device,
        input_args=tokens if index == 0 else hidden,
        output_args=logits if index == stages - 1 else hidden,
        group=mesh["pp"].get_group(),
    )


def load_text() -> torch.Tensor:
    """Return the documentation that Python's help() prints, as bytes: uint8, one dimension."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)


def batch(text: torch.Tensor, args: argparse.Namespace, number: int, device: torch.device):
    """Return the inputs and labels of one training step of one replica of the pipeline.

    A replica is one of the data-parallel pipelines. A label is the byte that follows its input.

    Args:
        text: The training text, as bytes.
        args: The script's options.
        number: step * replicas + replica. With the seed, it decides which samples are drawn. So
            they differ between replicas and steps, and are the same in every run.
        device: Device of the returned tensors.

    Returns:
        inputs, labels: int64 tensors [samples, sequence].
    """
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + number)
    samples = args.micro_batch * args.micro_batches
    starts = torch.randint(len(text) - args.sequence - 1, (samples,), generator=generator)
    rows = torch.stack([text[start : start + args.sequence + 1] for start in starts])
    rows = rows.long().to(device)
    inputs = rows[:, :-1].contiguous()  # torch up to 2.12 expects contiguous inputs of a stage
    labels = rows[:, 1:]  # a label is the byte that follows its input
    return inputs, labels


def cross_entropy(logits, labels):
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


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
    replicas = dist.get_world_size() // args.pipeline
    sizes = {"pp": args.pipeline, "dp": replicas}
    names = tuple(args.mesh.split(","))
    mesh_shape = tuple(sizes[name] for name in names)
    mesh = init_device_mesh(device.type, mesh_shape, mesh_dim_names=names)
    replica = mesh.get_local_rank("dp")
    first_stage = mesh.get_local_rank("pp")

    stage_count = args.pipeline * args.chunks
    stages = [
        make_stage(index, stage_count, args, device, mesh)
        for index in range(first_stage, stage_count, args.pipeline)
    ]
    schedule_class = get_schedule_class(args.schedule)
    has_one_stage_a_rank = issubclass(schedule_class, PipelineScheduleSingle)
    schedule = schedule_class(
        stages[0] if has_one_stage_a_rank else stages, args.micro_batches, loss_fn=cross_entropy
    )
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr)
    # In a checkpoint, the names of a stage's weights begin with the stage's number.
    numbered = nn.ModuleDict({f"stage{stage.stage_index}": stage.submod for stage in stages})
    # The optimizer's entries have names, not numbers, since each rank has only some of the parameters.
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

    text = load_text()
    writes_log = args.log_file and dist.get_rank() == 0
    if writes_log:
        Path(args.log_file).write_text("")
    options = {}
    if "return_outputs" in inspect.signature(schedule.step).parameters:  # since torch 2.10
        options["return_outputs"] = False
    for step in range(first, args.steps):
        begin = time.perf_counter()
        inputs, labels = batch(text, args, step * replicas + replica, device)
        losses = []  # the last stage adds the loss of each micro-batch
        stage_inputs = [inputs] if stages[0].is_first else []
        if stages[-1].is_last:
            schedule.step(*stage_inputs, target=labels, losses=losses, **options)
        else:
            schedule.step(*stage_inputs, **options)
        optimizer.step()
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        if losses:
            total = torch.stack(losses).mean().detach() / replicas
        dist.all_reduce(total)
        seconds = time.perf_counter() - begin
        if dist.get_rank() == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step + 1}: loss {total:.4f}, {seconds:.3f} s", flush=True)
        if writes_log:
            line = {"step": step + 1, "loss": total.item(), "seconds": seconds}
            with open(args.log_file, "a") as log:
                print(json.dumps(line), file=log)
        if args.save and step + 1 == (args.save_after or args.steps):
            weights, moments = get_state_dict(numbered, optimizer, options=by_name)
            state = {"model": weights, "optimizer": moments, "step": step + 1}
            dcp.save(state, checkpoint_id=args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
