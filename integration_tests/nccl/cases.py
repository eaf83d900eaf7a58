"""Script of one rank of a small NCCL job ("case") for test_gpus.py.

    python cases.py CASE [--holmes ...]

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
from holmes_ext.runtime.groups.receive_order import Order1F1B
from holmes_ext.runtime.reduce.hierarchical_nccl import HierarchicalCollectives

DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
LIMIT = timedelta(seconds=120)
#: [ranks, name of the network] of each process group, in the order of first use.
used: list = []


def init(**more) -> tuple[int, int]:
    """Initialize torch.distributed over NCCL, and return the rank and the number of ranks."""
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", timeout=LIMIT, **more)
    return dist.get_rank(), dist.get_world_size()


def use(group=None) -> float:
    """Return the sum of the ranks' numbers over a group, and record the group and its network."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    current = session.active()  # None without holmes
    network = current.transport(ranks, "nccl").net_name if current is not None else ""
    used.append([ranks, network])
    value = torch.full((1 << 18,), float(dist.get_rank()), device=DEVICE)
    dist.all_reduce(value, group=group)
    torch.cuda.synchronize()
    return value[-1].item()


def report(result: dict) -> None:
    """Print the result of the case as a JSON line."""
    has_holmes = session.active() is not None
    line = {"rank": dist.get_rank(), **result, "holmes": has_holmes, "groups": used}
    print(json.dumps(line), flush=True)


def group_of_half(rank: int, world: int) -> dist.ProcessGroup:
    """Make a process group of each half of the ranks, and return the group of this rank."""
    half = world // 2
    first = dist.new_group(list(range(half)))
    second = dist.new_group(list(range(half, world)))
    return first if rank < half else second


def networks() -> dict:
    """Make a group inside each half of the ranks and one across them, and use each."""
    rank, world = init()
    half = world // 2
    inside = group_of_half(rank, world)
    across = dist.new_group([0, half])
    return {
        "world": use(),
        "inside": use(inside),
        "across": use(across) if rank in (0, half) else None,
    }


def absent_network() -> dict:
    """Use a group whose network NCCL cannot find, and return the error."""
    rank, world = init()
    inside = group_of_half(rank, world)
    world_sum = use()
    message = ""
    try:
        use(inside)
    except RuntimeError as error:
        message = str(error)
    report({"world": world_sum, "failed": message})
    os._exit(0)  # an ordinary exit could wait for the failed communicator


def bound_device() -> dict:
    """Make groups with a bound device, as DeepSpeed does; one is made by its members alone."""
    rank, world = init(device_id=DEVICE)
    sums = {"world": use()}
    if rank < 2:
        sums["pair"] = use(members_group([0, 1], "case pair"))
    # torch splits this group off the default group, over all ranks.
    later = dist.new_group(list(range(world)))
    return {**sums, "later": use(later)}


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
    # Process groups of this rank and a neighbour.
    group_by_peer = p2p.neighbour_groups_of(group).by_peer
    return {"value": value[-1].item(), "pairs": sorted(group_by_peer)}


def settings(group) -> list:
    """Return a group's largest number of CTAs, its priority and its timeout in seconds."""
    options = group._get_backend(DEVICE).options
    timeout_s = options._timeout.total_seconds()
    return [options.config.max_ctas, options.is_high_priority_stream, timeout_s]


def mailbox() -> dict:
    """Run ten steps of a pipeline of four stages whose receives are posted early.

    Each pass waits for the device.
    """
    rank, world = init(pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True))
    stage_of_rank = {stage: stage for stage in range(world)}
    neighbours = zip(range(world), range(1, world))
    box = of_pairs(neighbours, rank, stage_of_rank, dist.group.WORLD)
    receive_order = Order1F1B((6, 4, 3, 1))  # micro-batches in flight of each stage
    micro_batches = 8
    wrong = torch.zeros((), device=DEVICE)  # number of wrong elements
    for peer in box.neighbours:
        box.expect([((4099,), torch.float32)], peer)
    for _ in range(10):
        box.begin(receive_order, micro_batches, wrong)
        in_flight = receive_order.in_flight[rank]
        # kind: "F" for a forward pass, "B" for a backward pass; index: of the micro-batch
        for kind, index, _ in passes(rank, world, micro_batches, in_flight=in_flight):
            if kind == "F":
                source, target = rank - 1, rank + 1
                stages_before = rank
            else:
                source, target = rank + 1, rank - 1
                stages_before = world - 1 - rank
            box.sending_pass = (kind, index)
            value = torch.full((4099,), float(index), device=DEVICE)
            if 0 <= source < world:
                box.recv(value, source)
            torch.cuda.synchronize()
            wrong += (value != index + stages_before).sum()  # each stage has added 1
            if 0 <= target < world:
                box.send(value + 1, target)
            box.post_due_receives(kind, index)
            if kind == "B":
                box.release_sent("F", index)
            elif rank:
                box.release_sent("B", index - receive_order.in_flight[rank - 1])
        box.end()
    return {"wrong": int(wrong), "settings": [settings(group) for group in box.by_peer.values()]}


def beside_receives() -> dict:
    """Return whether a kernel runs while one, or two, receives launched before it wait for messages."""
    rank, _ = init()
    results = {"world": use()}
    store = dist.distributed_c10d._get_default_store()
    is_sender = rank % 2 == 1
    peer = rank ^ 1  # ranks 0 and 1 are a pair, and so on
    values = torch.ones(2, 1 << 12, device=DEVICE)
    operand = torch.ones(1, device=DEVICE)
    # The first message makes the pair's communicator.
    first = dist.isend(operand, peer) if is_sender else dist.irecv(operand, peer)
    first.wait()
    for count in (1, 2):
        if is_sender:
            store.get(f"{count} receives are posted by {peer}")
            works = [dist.isend(value, peer) for value in values[:count]]
        else:
            works = [dist.irecv(value, peer) for value in values[:count]]
            kernel_end = torch.cuda.Event()
            operand.mul_(2)
            kernel_end.record()
            until = time.monotonic() + 5
            has_run = kernel_end.query()
            while not has_run and time.monotonic() < until:
                time.sleep(0.01)
                has_run = kernel_end.query()
            results[f"beside {count}"] = has_run
            store.set(f"{count} receives are posted by {rank}", "")
        for work in works:
            work.wait()
        torch.cuda.synchronize()
    return results


def hierarchical() -> dict:
    """Return the largest relative error of hierarchical all-reduces, by type and compression.

    The sizes are odd, and the reference is a sum in float64.
    """
    rank, world = init()
    largest: dict[str, float] = {}
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
                torch.randn(size, generator=torch.Generator().manual_seed(other))
                for other in range(world)
            ]
            mine = parts[rank].to(DEVICE, kind)
            reduction.all_reduce(mine).wait()
            expected = torch.stack(parts).to(kind).double().sum(0)
            difference = (mine.double().cpu() - expected).abs().max() / expected.abs().max()
            largest[name] = max(largest.get(name, 0.0), difference.item())
    return {"differences": largest}


def compiled() -> dict:
    """Compare the gradients of a compiled model in DistributedDataParallel with their mean."""
    rank, world = init()
    net = model(64)
    worst = 0.0
    wrapped = DistributedDataParallel(torch.compile(net, backend="aot_eager"))
    for step in range(4):
        generator = torch.Generator().manual_seed(100 * step + rank)
        batch = torch.randn(8, 64, generator=generator).to(DEVICE)
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
    """Compare the gradients of hybrid FSDP2 with their mean.

    With a bound device, torch splits the groups of the mesh off the default group.
    """
    rank, world = init(device_id=DEVICE)
    world_sum = use()
    mesh = init_device_mesh("cuda", (2, world // 2), mesh_dim_names=("replicas", "shards"))
    plain = model(64)
    net = model(64)
    worst = 0.0
    for layer in (*net, net):
        fully_shard(layer, mesh=mesh)
    for step in range(4):
        generator = torch.Generator().manual_seed(100 * step + rank)
        batch = torch.randn(8, 64, generator=generator).to(DEVICE)
        for module in (plain, net):
            module.zero_grad(set_to_none=True)
            module(batch).square().mean().backward()
        for unsharded, sharded_parameter in zip(plain.parameters(), net.parameters()):
            dist.all_reduce(unsharded.grad)
            mean = unsharded.grad / world
            difference = (sharded_parameter.grad.full_tensor() - mean).abs().max().item()
            worst = max(worst, difference)
    return {
        "world": world_sum,
        "difference": worst,
        "inside": use(mesh.get_group("shards")),
        "across": use(mesh.get_group("replicas")),
    }


def nic_down() -> dict:
    """Reduce inside each half without end, and set all hosts' HCA to DOWN in sysfs after some steps."""
    rank, world = init()
    value = torch.ones(4099, device=DEVICE)
    inside = group_of_half(rank, world)
    (port,) = Path(os.environ["HOLMES_SYSFS"]).glob("class/infiniband/*/ports/1/state")
    for step in range(100_000):
        dist.all_reduce(value, op=dist.ReduceOp.AVG, group=inside)
        torch.cuda.synchronize()
        if step == 3 and rank == 0:
            port.write_text("1: DOWN\n")
        time.sleep(0.05)
    return {}


def split() -> dict:
    """Return the settings of a group made by split_group, which has a network of its own."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 4
    rank, world = init(device_id=DEVICE, pg_options=options)
    world_sum = use()
    half = world // 2
    group = dist.split_group(None, [list(range(half)), list(range(half, world))])
    group_options = group._get_backend(DEVICE).options
    return {
        "world": world_sum,
        "inside": use(group),
        "max_ctas": group_options.config.max_ctas,
        "priority": group_options.is_high_priority_stream,
    }


def model(width: int = 512) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=True) for _ in range(9))).to(
        DEVICE
    )


def differences(backward) -> float:
    """Compare GradientReducer's averages with torch's in 20 backward passes.

    Returns:
        The largest relative difference.
    """
    rank, world = init()
    net = model()
    worst = 0.0
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
            worst = max(worst, float("inf") if error.isnan() else error.item())
    return worst


def reduction() -> dict:
    """Compare the averages of GradientReducer with torch's."""
    return {"difference": differences(lambda net, batch: net(batch).square().mean().backward())}


def side_streams() -> dict:
    """Run halves of the model on separate streams, on which autograd also runs their backward passes."""
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
    """Return the bytes that stay allocated after 40 all-gathers of 64 MiB outside any training step.

    An evaluation loop calls such collectives.
    """
    rank, world = init()
    use()
    before = torch.cuda.memory_allocated()
    share = torch.ones((64 << 20) // 4 // world, device=DEVICE)
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
