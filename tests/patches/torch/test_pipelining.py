"""torch.distributed.pipelining over two clusters of two.

The weights are the same as stock's under every schedule. Messages go over the pairs' groups, and
reductions end with the schedule.
"""

import io
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from clusters import site
from ranks import RankError, run_ranks, seeded
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel

from holmes_ext.options import Options, options_from
from holmes_ext.patches import registry
from holmes_ext.patches.torch import ddp as ddp_patches
from holmes_ext.patches.torch import pipelining
from holmes_ext.patches.torch import schedule as passes_patches
from holmes_ext.plan import maker
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.schedule import PassOrder
from holmes_ext.plan.sizes import parse_sizes
from holmes_ext.runtime import session
from holmes_ext.runtime.reduce.weight_gradients import WeightGradients
from holmes_ext.runtime.start.launcher import Process

MICRO_BATCHES = 4
CLUSTERS = ("a ib 100Gb/s a[0-1]", "b roce 100Gb/s b[0-1]")


@contextmanager
def holmes(rank, clusters=CLUSTERS, sizes="", features=("pipelining", "ddp")):
    """Switch holmes on in this process, one of four ranks, until the context ends.

    Args:
        clusters: Description of each cluster and its nodes.
        sizes: Value of --holmes-sizes, e.g. "pipeline=2"; "" for none.
        features: The parts of holmes that change torch.
    """
    cluster_site = site(*clusters)
    if sizes:
        planned_sizes = parse_sizes(sizes, "the test").complete(4)  # for 4 ranks
        options = options_from(sizes=sizes)
    else:
        planned_sizes = None
        options = Options()
    process = Process(
        rank, 4, 0, 1, "", 0, "test"
    )  # rank and world size; local rank and local world size
    plan = build_plan(cluster_site, planned_sizes)
    current = session.Session(options, process, cluster_site, plan, rank, maker=maker)
    session.set_active(current)
    registry().enable(list(features), required=True)
    try:
        yield current
    finally:
        registry().undo()
        session.set_active(None)
        # Groups of pairs are kept for each pipeline's group. The next test may have the same group: the
        # default group.
        pipelining._pair_groups.clear()


class Convolution(nn.Module):
    """A convolution from [batch, 48] to the same, whose weights have the strides of channels_last."""

    def __init__(self):
        super().__init__()
        convolution = nn.Conv2d(3, 3, kernel_size=3, padding=1)
        self.convolution = convolution.to(memory_format=torch.channels_last)

    def forward(self, x):
        images = x.view(-1, 3, 4, 4)
        return self.convolution(images).reshape(x.shape)


def make(index, stages, mesh, data, options, channels_last=False):
    torch.manual_seed(index)
    if channels_last:
        module = Convolution()
    else:
        module = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48))
    if data == "ddp":
        module = DistributedDataParallel(module, process_group=mesh["dp"].get_group(), **options)
    elif data == "fsdp":
        module = fully_shard(module, mesh=mesh["dp"])
    # torch 2.13 must not try out DDP's forward
    message = torch.empty(8 // MICRO_BATCHES, 48, requires_grad=True)
    return PipelineStage(
        module,
        index,
        stages,
        torch.device("cpu"),
        message if index else message.detach(),
        message,
        group=mesh["pp"].get_group(),
    )


def train(
    pipeline,
    schedule,
    chunks=1,
    data="ddp",
    order=("pp", "dp"),
    options=None,
    steps=3,
    hook=None,
    channels_last=False,
):
    """Weights after some steps. The group of this rank's pipeline, and those of its data-parallel stages."""
    sizes = {"pp": pipeline, "dp": dist.get_world_size() // pipeline}
    mesh = init_device_mesh("cpu", tuple(sizes[name] for name in order), mesh_dim_names=order)
    place, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    count = pipeline * chunks
    stages = [
        make(index, count, mesh, data, options or {}, channels_last)
        for index in range(place, count, pipeline)
    ]
    if hook:
        for stage in stages:
            stage.submod.register_comm_hook(stage.submod.process_group, hook)
    cls = schedules.get_schedule_class(schedule)
    single = issubclass(cls, schedules.PipelineScheduleSingle)
    run = cls(stages[0] if single else stages, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    weights = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    for step in range(steps):
        generator = seeded(100 * step + replica)
        x, y = torch.randn(2, 8, 48, generator=generator)
        given = {"target": y, "losses": []} if stages[-1].is_last else {}
        run.step(*([x] if stages[0].is_first else []), **given)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return [getattr(p, "_local_tensor", p).detach().clone() for p in weights], stages


def both(rank, *args, clusters=CLUSTERS, **more):
    """Train twice, without holmes and with it.

    Returns the largest difference between the weights, and the groups of pairs of neighbouring stages: rank
    of the neighbour -> ranks of the group.
    """
    weights_without_holmes, _ = train(*args, **more)
    with holmes(rank, clusters):
        weights, stages = train(*args, **more)
        # For each pipeline's group: rank of a neighbour -> the group of this rank and the neighbour.
        group_of_peer = pipelining._pair_groups[stages[0].group]
        pairs = {peer: dist.get_process_group_ranks(group) for peer, group in group_of_peer.items()}
    tensor_pairs = zip(weights_without_holmes, weights, strict=True)
    largest_difference = max(float((a - b).abs().max()) for a, b in tensor_pairs)
    return largest_difference, pairs


#: name -> (arguments of train, its options)
CASES = {
    "1F1B": ((2, "1F1B"), {}),
    "four stages": ((4, "1F1B"), {"data": ""}),
    "four stages in one cluster": ((4, "1F1B"), {"data": "", "clusters": ("a ib 100Gb/s a[0-3]",)}),
    "interleaved": ((2, "Interleaved1F1B", 2), {}),
    "breadth first": ((2, "LoopedBFS", 2), {}),
    "replicas across": ((2, "LoopedBFS", 2), {"order": ("dp", "pp")}),
    "gradients as views": ((2, "LoopedBFS", 2), {"options": {"gradient_as_bucket_view": True}}),
    "channels last": ((2, "LoopedBFS", 2), {"channels_last": True}),
    "channels last, gradients as views": (
        (2, "1F1B"),
        {"channels_last": True, "options": {"gradient_as_bucket_view": True}},
    ),
    "unused parameters": ((2, "LoopedBFS", 2), {"options": {"find_unused_parameters": True}}),
    "a hook of the program's": ((2, "LoopedBFS", 2), {"hook": default_hooks.fp16_compress_hook}),
    "FSDP": ((2, "LoopedBFS", 2), {"data": "fsdp"}),
    "zero bubble": ((4, "InterleavedZeroBubble", 2), {"data": "fsdp"}),
}


def all_cases(rank):
    sys.stderr = io.StringIO()
    return {name: both(rank, *args, **more) for name, (args, more) in CASES.items()}


@pytest.fixture(scope="module")
def results():
    return run_ranks(all_cases, 4, timeout_s=240)


@pytest.mark.parametrize("name", CASES)
def test_weights_are_stock_s(results, name):
    assert all(of_rank[name][0] < 1e-6 for of_rank in results)


def test_pairs_of_stages_have_groups_where_one_is_inside_a_cluster(results):
    assert [of_rank["four stages"][1] for of_rank in results] == [
        {1: [0, 1], 3: [0, 3]},
        {0: [0, 1], 2: [1, 2]},
        {1: [1, 2], 3: [2, 3]},
        {0: [0, 3], 2: [2, 3]},
    ]
    assert all(of_rank["four stages in one cluster"][1] == {} for of_rank in results)


def events_of_two_steps(rank, args):
    """Train two steps of a pipeline with holmes, and return the events of this rank in order.

    Events are "backward S" (a backward pass of stage S), "reduce" (the reduction of a bucket starts) and
    "finish" (the rank waits for the reductions of a stage).
    """
    events = []

    def record(patch, owner, method, event_of):
        """Let each call of the method append event_of(its object) to `events`."""
        original = getattr(owner, method)

        def recorded(self, *args, **kwargs):
            events.append(event_of(self))
            return original(self, *args, **kwargs)

        patch.setattr(owner, method, recorded)

    with holmes(rank), pytest.MonkeyPatch.context() as patch:
        record(patch, ddp_patches.BucketReducer, "reduce", lambda reducer: "reduce")
        record(patch, ddp_patches.BucketReducer, "finish", lambda reducer: "finish")
        record(
            patch,
            PipelineStage,
            "backward_one_chunk",
            lambda stage: f"backward {stage.stage_index}",
        )
        train(*args, order=("dp", "pp"), steps=2)  # order: dimensions of the device mesh
    return events


def test_breadth_first_reductions_end_with_the_schedule():
    """With LoopedBFS, rank 0 waits for the reductions of its stages 0 and 2 only at the end of each step."""
    events = run_ranks(events_of_two_steps, 4, (2, "LoopedBFS", 2))[0]
    passes = ["backward 2"] * 4 + ["reduce"] + ["backward 0"] * 4 + ["reduce"]  # 4 micro-batches
    assert events == 2 * [*passes, "finish", "finish"]


def test_1f1b_s_reductions_end_with_the_schedule_too():
    """With 1F1B, rank 0 waits for the reduction of its stage only at the end of each step."""
    events = run_ranks(events_of_two_steps, 4, (2, "1F1B"))[0]
    assert events == 2 * [*["backward 0"] * 4, "reduce", "finish"]  # 4 micro-batches


def planned(rank, order, sizes, schedule=(2, "1F1B")):
    said = sys.stderr = io.StringIO()
    with holmes(rank, sizes=sizes):
        train(*schedule, order=order, steps=1)
    return said.getvalue()


def test_gradients_that_torch_leaves_unreduced_are_told():
    told = run_ranks(planned, 4, ("pp", "dp"), "", (2, "InterleavedZeroBubble", 2))[0]
    assert told.count("torch leaves them unreduced") == 1


def test_an_order_that_spans_is_told_with_the_way_out():
    assert run_ranks(planned, 4, ("pp", "dp"), "")[0] == ""
    told = run_ranks(planned, 4, ("dp", "pp"), "")[0]
    assert (
        "2 data groups span clusters" in told
        and "--holmes-sizes pipeline=2,order=tp-cp-ep-pp-dp" in told
    )


def test_other_sizes_than_planned_are_refused():
    with pytest.raises(RankError, match="pipeline"):
        run_ranks(planned, 4, ("pp", "dp"), "pipeline=4")


#: Of four stages, 4 micro-batches: what plan/passes finds for a stage link of three passes in the
#: middle, 4 in
#: flight.
SCHEDULE = (
    "F0 F1 F2 F3 B0 B1 B2 B3",
    "F0 F1 F2 F3 I0 W0 I1 W1 I2 W2 I3 W3",
    "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
    "F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3",
)


def in_listed_passes(rank, schedule, data):
    """Train with weights' gradients in passes of their own.

    Returns:
        (difference of the weights to stock's, the messages, weights' gradients that waited)
    """
    said = sys.stderr = io.StringIO()
    stages, stock_data = (4, "") if not data else (2, data)
    stock, _ = train(stages, schedule, data=stock_data)
    with holmes(
        rank, sizes=f"pipeline={stages}", features=("pipelining", "ddp", "torch-schedule")
    ) as current:
        plan = current.plan
        texts = SCHEDULE[:1] + SCHEDULE[-1:] if stages == 2 else SCHEDULE
        plan = replace(plan, traffic=tuple(replace(one, schedule=texts) for one in plan.traffic))
        session.set_active(replace(current, plan=plan))
        make, late = WeightGradients.make, []
        WeightGradients.make = lambda self, number: (
            late.append(len(self._kept[number])) or make(self, number)
        )
        ours, _ = train(stages, schedule, data=stock_data)
        WeightGradients.make = make
    return (
        max(float((a - b).abs().max()) for a, b in zip(stock, ours, strict=True)),
        said.getvalue(),
        late,
    )


needs_passes = pytest.mark.skipif(
    torch.__version__ < (2, 8), reason="torch-schedule needs torch 2.8"
)


@needs_passes
@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_listed_passes_leave_the_weights_of_stock(schedule):
    for difference, told, late in run_ranks(in_listed_passes, 4, schedule, "", timeout_s=120):
        assert difference == 0 and told == "" and len(late) == 3 * MICRO_BATCHES and min(late) > 0


@needs_passes
def test_stages_that_reduce_themselves_keep_their_passes_and_it_is_told():
    found = run_ranks(in_listed_passes, 4, "1F1B", "ddp", timeout_s=120)
    assert all(difference < 1e-6 and not late for difference, _, late in found)
    assert found[0][1].count("keeps its own passes: its stages reduce") == 1


@needs_passes
@pytest.mark.parametrize(
    "texts, posted",
    [
        # gloo: as early as the other end may send
        (
            ("F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"),
            (
                "F0 SEND_F0 RECV_B0 F1 SEND_F1 RECV_B1 B0 F2 SEND_F2 RECV_B2 B1 B2",
                "RECV_F0 RECV_F1 F0 B0 SEND_B0 RECV_F2 F1 B1 SEND_B1 F2 B2 SEND_B2",
            ),
        ),
        # NCCL: in the order of the stage link's messages, a0 a1 g0 a2 g1 g2
        (
            ("F0 F1 g0 B0 F2 g1 g2 B1 B2", "F0 B0 F1 B1 F2 B2"),
            (
                "F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 F2 SEND_F2 RECV_B1 RECV_B2 B1 B2",
                "RECV_F0 RECV_F1 F0 B0 SEND_B0 RECV_F2 F1 B1 SEND_B1 F2 B2 SEND_B2",
            ),
        ),
    ],
)
def test_receives_stand_where_the_plan_posts_them(texts, posted):
    """_with_receives_moved() puts each receive of a stage to its position in the plan.

    `texts` is the plan: the passes of each stage, e.g. "F0", the forward pass of micro-batch 0. `posted` has
    the expected order of passes, sends and receives of each stage.
    """
    planned = PassOrder.parse(texts)
    for stage, expected in enumerate(posted):
        words = expected.split()
        # Before, the receives stand behind all others. Where they stand in torch's schedule is irrelevant.
        receives_last = sorted(words, key=lambda word: "RECV" in word)
        # torch writes an action with its stage in front, e.g. "1F0", or "1RECV_F0".
        actions = [schedules._Action.from_str(f"{stage}{word}") for word in receives_last]
        moved = passes_patches._with_receives_moved(actions, planned, stage)
        assert [str(action) for action in moved] == [f"{stage}{word}" for word in words]
