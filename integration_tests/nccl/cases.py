"""Script of one rank of a small NCCL job ("case") for test_gpus.py.

    python cases.py SCENE [--holmes ...]

Prints a JSON line with the rank, the result of the case, and "groups": for each process group, in the order
of first use, its ranks and the network that holmes gave it.

Several ranks may share one GPU. Each has an NCCL_HOSTID of its own, so NCCL takes the ranks for different
hosts and uses its network between them.
"""

import gc
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holmes_ext
from holmes_ext.patches.megatron import p2p
from holmes_ext.plan.schedule import passes
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.mailbox import of_pairs
from holmes_ext.runtime.groups.members import members_group
from holmes_ext.runtime.groups.receive_order import ReceiveOrder
from holmes_ext.runtime.reduce.hierarchical_nccl import HierarchicalCollectives

DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
LIMIT = timedelta(seconds=120)
used: list = []


def init(**more) -> tuple[int, int]:
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", timeout=LIMIT, **more)
    return dist.get_rank(), dist.get_world_size()


def use(group=None) -> float:
    """The sum of the ranks' numbers over `group`, and a note of what it asked NCCL for."""
    ranks, current = dist.get_process_group_ranks(group or dist.group.WORLD), session.active()
    used.append([ranks, current.transport(ranks, "nccl").net_name if current is not None else ""])
    value = torch.full((1 << 18,), float(dist.get_rank()), device=DEVICE)
    dist.all_reduce(value, group=group)
    torch.cuda.synchronize()
    return value[-1].item()


def report(found: dict) -> None:
    on = session.active() is not None
    print(json.dumps({"rank": dist.get_rank(), **found, "holmes": on, "groups": used}), flush=True)


def networks() -> dict:
    """A group inside each half of the ranks and one across, as new_group makes them."""
    rank, world = init()
    half = world // 2
    inside = [dist.new_group(list(range(start, start + half))) for start in (0, half)][rank >= half]
    across = dist.new_group([0, half])
    return {
        "world": use(),
        "inside": use(inside),
        "across": use(across) if rank in (0, half) else None,
    }


def absent_network() -> dict:
    """What becomes of a group that asks for a network that NCCL does not find."""
    rank, world = init()
    half = world // 2
    inside = [dist.new_group(list(range(start, start + half))) for start in (0, half)][rank >= half]
    world_sum, failed = use(), ""
    try:
        use(inside)
    except RuntimeError as error:
        failed = str(error)
    report({"world": world_sum, "failed": failed})
    os._exit(0)  # what is left of the failed communicator may not be waited for


def bound_device() -> dict:
    """Groups that their members alone make, under init_process_group(device_id=...), as DeepSpeed starts."""
    rank, world = init(device_id=DEVICE)
    found = {"world": use()}
    if rank < 2:
        found["pair"] = use(members_group([0, 1], "case pair"))
    later = dist.new_group(
        list(range(world))
    )  # which torch splits off the default group, over all its ranks
    return {**found, "later": use(later)}


def pipeline() -> dict:
    """Send a tensor along four pipeline stages and back, with batched sends and receives of megatron-core.

    Each stage adds 1 before it sends the tensor on. No device is bound to the process group, so the first
    batch of a group makes its communicator.
    """
    rank, world = init()
    group = dist.group.WORLD

    def batched_p2p_ops(*, group, prev_pipeline_rank, next_pipeline_rank, **tensors):
        """Start sends and receives as one batch, as megatron-core's _batched_p2p_ops does.

        The names of the tensors are tensor_send_prev, tensor_recv_prev, tensor_send_next, tensor_recv_next.
        """
        operations = {"send": dist.isend, "recv": dist.irecv}
        peers = {"prev": prev_pipeline_rank, "next": next_pipeline_rank}
        ops: list[dist.P2POp] = []
        for name, tensor in tensors.items():
            if tensor is not None:
                _, operation, side = name.split("_")
                ops.append(dist.P2POp(operations[operation], tensor, peers[side], group))
        return dist.batch_isend_irecv(ops) if ops else []

    def send_and_receive(**given) -> None:
        """Send and receive the given tensors, such as send_next=tensor, and wait until both are done."""
        names = ("send_prev", "send_next", "recv_prev", "recv_next")
        tensors = {f"tensor_{name}": given.get(name) for name in names}
        peers = {"prev_pipeline_rank": (rank - 1) % world, "next_pipeline_rank": (rank + 1) % world}
        # The wrapper of holmes around the function gives each pair of neighbours a process group of its own.
        # As wrapt calls it, its arguments are the function, its instance (None), args and kwargs.
        requests = p2p._start_batch_with_each_neighbour(
            batched_p2p_ops, None, (), {"group": group, **peers, **tensors}
        )
        for request in requests:
            request.wait()
        torch.cuda.synchronize()

    is_first, is_last = rank == 0, rank == world - 1
    value = torch.zeros(1 << 16, device=DEVICE)  # all elements stay equal
    if not is_first:
        send_and_receive(recv_prev=value)
    if not is_last:
        send_and_receive(send_next=value + 1)
        send_and_receive(recv_next=value)
    if not is_first:
        send_and_receive(send_prev=value + 1)
    group_by_peer = p2p.neighbour_groups_of(
        group
    ).by_peer  # process groups of this rank and a neighbour
    return {"value": value[-1].item(), "pairs": sorted(group_by_peer)}


def settings(group) -> list:
    own = group._get_backend(DEVICE).options
    return [own.config.max_ctas, own.is_high_priority_stream, own._timeout.total_seconds()]


def mailbox() -> dict:
    """Ten steps of a pipeline of four stages whose receives are posted early, with a wait for the device in
    each pass.
    """
    rank, world = init(pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True))
    box = of_pairs(
        zip(range(world), range(1, world)),
        rank,
        {one: one for one in range(world)},
        dist.group.WORLD,
    )
    flight, count, wrong = ReceiveOrder((6, 4, 3, 1)), 8, torch.zeros((), device=DEVICE)
    for peer in box.neighbours:
        box.expect([((4099,), torch.float32)], peer)
    for _ in range(10):
        box.begin(flight, count, wrong)
        for kind, index, _ in passes(rank, world, count, in_flight=flight.in_flight[rank]):
            box.sending_pass, value = (
                (kind, index),
                torch.full((4099,), float(index), device=DEVICE),
            )
            source, target = (rank - 1, rank + 1) if kind == "F" else (rank + 1, rank - 1)
            if 0 <= source < world:
                box.recv(value, source)
            torch.cuda.synchronize()
            wrong += (value != index + (rank if kind == "F" else world - 1 - rank)).sum()
            if 0 <= target < world:
                box.send(value + 1, target)
            box.post_due_receives(kind, index)
            if kind == "B":
                box.release_sent("F", index)
            elif rank:
                box.release_sent("B", index - flight.in_flight[rank - 1])
        box.end()
    return {"wrong": int(wrong), "settings": [settings(group) for group in box.by_peer.values()]}


def beside_receives() -> dict:
    """Whether a kernel runs beside one receive that waits for its message, and beside two of one stream: they
    were launched before it."""
    rank, _ = init()
    found, store, peer = {"world": use()}, dist.distributed_c10d._get_default_store(), rank ^ 1
    values, one = torch.ones(2, 1 << 12, device=DEVICE), torch.ones(1, device=DEVICE)
    first = (
        dist.isend(one, peer) if rank % 2 else dist.irecv(one, peer)
    )  # makes the pair's communicator
    first.wait()
    for count in (1, 2):
        if rank % 2:
            store.get(f"{count} receives are posted by {peer}")
            works = [dist.isend(value, peer) for value in values[:count]]
        else:
            works, done = [dist.irecv(value, peer) for value in values[:count]], torch.cuda.Event()
            one.mul_(2)
            done.record()
            until = time.monotonic() + 5
            while not (beside := done.query()) and time.monotonic() < until:
                time.sleep(0.01)
            found[f"beside {count}"] = beside
            store.set(f"{count} receives are posted by {rank}", "")
        for work in works:
            work.wait()
        torch.cuda.synchronize()
    return found


def hierarchical() -> dict:
    """Greatest relative difference to a sum in float64, by what is summed: odd sizes, types, compression."""
    rank, world = init()
    found = {}
    for name, kind, compress in (
        ("float32", torch.float32, "off"),
        ("bfloat16", torch.bfloat16, "off"),
        ("int8", torch.float32, "int8"),
    ):
        reduction = HierarchicalCollectives(
            [[0, 1], [2, 3]], chunk_bytes=1 << 14, compress=compress, purpose=name
        )
        for size in (1, 7, 4099, 1 << 16):
            parts = [
                torch.randn(size, generator=torch.Generator().manual_seed(one))
                for one in range(world)
            ]
            mine = parts[rank].to(DEVICE, kind)
            reduction.all_reduce(mine).wait()
            expected = torch.stack(parts).to(kind).double().sum(0)
            difference = (mine.double().cpu() - expected).abs().max() / expected.abs().max()
            found[name] = max(found.get(name, 0.0), difference.item())
    return {"differences": found}


def compiled() -> dict:
    """Greatest difference of the gradients of a compiled model in DistributedDataParallel to their mean."""
    rank, world = init()
    net, worst = model(64), 0.0
    wrapped = DistributedDataParallel(torch.compile(net, backend="aot_eager"))
    for step in range(4):
        batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank)).to(
            DEVICE
        )
        net(batch).square().mean().backward()
        expected = [parameter.grad.clone() for parameter in net.parameters()]
        for gradient in expected:
            dist.all_reduce(gradient)
        net.zero_grad(set_to_none=True)
        wrapped(batch).square().mean().backward()
        for gradient, parameter in zip(expected, net.parameters()):
            worst = max(worst, (parameter.grad - gradient / world).abs().max().item())
        net.zero_grad(set_to_none=True)
    return {"difference": worst}


def sharded() -> dict:
    """Greatest difference of hybrid FSDP2's gradients to their mean; under a bound device torch splits the
    groups of its mesh off the default one."""
    rank, world = init(device_id=DEVICE)
    found = {"world": use()}
    mesh = init_device_mesh("cuda", (2, world // 2), mesh_dim_names=("replicas", "shards"))
    plain, net, worst = model(64), model(64), 0.0
    for layer in (*net, net):
        fully_shard(layer, mesh=mesh)
    for step in range(4):
        batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank)).to(
            DEVICE
        )
        for one in (plain, net):
            one.zero_grad(set_to_none=True)
            one(batch).square().mean().backward()
        for mine, parameter in zip(plain.parameters(), net.parameters()):
            dist.all_reduce(mine.grad)
            worst = max(
                worst, (parameter.grad.full_tensor() - mine.grad / world).abs().max().item()
            )
    return {
        **found,
        "difference": worst,
        "inside": use(mesh.get_group("shards")),
        "across": use(mesh.get_group("replicas")),
    }


def nic_down() -> dict:
    """Sums inside each half without an end; after some, all hosts' HCA is down, as sysfs has it."""
    rank, world = init()
    half, value = world // 2, torch.ones(4099, device=DEVICE)
    inside = [dist.new_group(list(range(start, start + half))) for start in (0, half)][rank >= half]
    (port,) = Path(os.environ["HOLMES_SYSFS"]).glob("class/infiniband/*/ports/1/state")
    for step in range(100_000):
        dist.all_reduce(value, op=dist.ReduceOp.AVG, group=inside)
        torch.cuda.synchronize()
        if step == 3 and rank == 0:
            port.write_text("1: DOWN\n")
        time.sleep(0.05)
    return {}


def split() -> dict:
    """split_group keeps the settings of its parent; its network is its own."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 4
    rank, world = init(device_id=DEVICE, pg_options=options)
    found = {"world": use()}
    half = world // 2
    made = dist.split_group(None, [list(range(half)), list(range(half, world))])
    own = made._get_backend(DEVICE).options
    return {
        **found,
        "inside": use(made),
        "max_ctas": own.config.max_ctas,
        "priority": own.is_high_priority_stream,
    }


def model(width: int = 512) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=True) for _ in range(9))).to(
        DEVICE
    )


def differences(backward) -> float:
    """Greatest difference between GradientReducer's averages and torch's, over 20 backward passes."""
    rank, world = init()
    net, worst = model(), 0.0
    reducer = holmes_ext.GradientReducer(net.named_parameters())
    for step in range(20):
        torch.manual_seed(100 * step + rank)
        batch = torch.randn(64, 512, device=DEVICE)
        net.zero_grad(set_to_none=True)
        backward(net, batch)
        expected = [parameter.grad.clone() for parameter in net.parameters()]
        for gradient in expected:
            dist.all_reduce(gradient)
        net.zero_grad(set_to_none=True)
        with reducer.overlapped():
            backward(net, batch)
        for gradient, parameter in zip(expected, net.parameters()):
            error = (parameter.grad - gradient / world).abs().max() / gradient.abs().max()
            worst = max(worst, error.item() if bool(error == error) else float("inf"))
    return worst


def reduction() -> dict:
    return {"difference": differences(lambda net, batch: net(batch).square().mean().backward())}


def side_streams() -> dict:
    """Halves of the model on streams of their own: autograd runs their backward on those too."""
    streams = [torch.cuda.Stream() for _ in range(2)]

    def backward(net, batch) -> None:
        halves = []
        for stream, part in zip(streams, (net[:5], net[5:])):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                halves.append(part(batch).square().mean())
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        sum(halves).backward()

    return {"difference": differences(backward)}


def memory() -> dict:
    """Bytes that 40 gathers of 64 MiB leave allocated, none of them inside a step: as an evaluation loop
    does."""
    rank, world = init()
    use()
    before, share = (
        torch.cuda.memory_allocated(),
        torch.ones((64 << 20) // 4 // world, device=DEVICE),
    )
    for _ in range(40):
        whole = torch.empty(share.numel() * world, device=DEVICE)
        dist.all_gather_into_tensor(whole, share, async_op=True).wait()
        torch.cuda.synchronize()
        del whole
    gc.collect()
    return {"kept": torch.cuda.memory_allocated() - before - share.nbytes}


CASES = {
    case.__name__: case
    for case in (
        networks,
        absent_network,
        bound_device,
        pipeline,
        mailbox,
        beside_receives,
        hierarchical,
        compiled,
        sharded,
        nic_down,
        split,
        reduction,
        side_streams,
        memory,
    )
}

if __name__ == "__main__":
    report(CASES[sys.argv[1]]())
    dist.destroy_process_group()
