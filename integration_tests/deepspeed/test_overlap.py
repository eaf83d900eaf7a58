"""Tests that overlapped reductions leave DeepSpeed's losses and weights as they are.

holmes's feature "overlap" reduces gradients during the last backward pass of a step. DeepSpeed's pipeline
engine without holmes ("stock") reduces them after it.

Each case, a configuration of DeepSpeed and of the model, trains twice from the same weights on the same
text: first without and then with the feature. After each case the feature is switched off, so that this is
tested, too. All runs are in the same 4 processes (2 pipeline stages x 2 data-parallel ranks) on loopback.
"""

import contextlib
import io
import sys
from typing import NamedTuple

import pytest
from carriers import ON_GPUS
from clusters import example
from ranks import run_cases, seeded

from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.patches import Registry
from holmes_ext.patches.deepspeed import reduce as deepspeed_reduce
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime import session
from holmes_ext.runtime.reduce import flat_bucket
from holmes_ext.runtime.reduce.owned import ReduceToOwners
from holmes_ext.samples import examples
from integration_tests.jobs import some

torch = pytest.importorskip("torch")
deepspeed = pytest.importorskip("deepspeed")
on_cpu = pytest.importorskip("integration_tests.deepspeed.on_cpu")
SITE = example()

STEPS = 4
MICRO_BATCHES = 3  # of each step and data-parallel rank
MICRO_BATCH = 2  # samples
SEQUENCE = 16  # bytes of text
ZERO = {"stage": 1, "reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
#: name -> (DeepSpeed's configuration, the model's options, largest difference of losses)
CASES = {
    "fp32": ({}, {}, 1e-6),
    "fp32 tied": ({}, {"tied": True}, 1e-6),
    # If a GPU has one hardware queue, all stages but the first hold their reductions like this.
    "fp32 tied, held until the backward has ended": ({}, {"tied": True, "held": True}, 1e-6),
    "fp32 clipping": ({"gradient_clipping": 0.1}, {}, 1e-6),
    "fp32 prescaled": ({"prescale_gradients": True}, {}, 1e-6),
    "fp32 predivided": ({"gradient_predivide_factor": 2.0}, {}, 1e-6),
    "fp32 sent as bf16": ({"communication_data_type": "bf16"}, {}, 1e-6),
    "fp32 checkpointing": (
        {},
        {"checkpoint": deepspeed.checkpointing.non_reentrant_checkpoint},
        1e-6,
    ),
    "fp32 reentrant checkpointing, tied": (
        {},
        {"checkpoint": deepspeed.checkpointing.checkpoint, "tied": True},
        1e-6,
    ),
    "fp32 frozen on the way": ({}, {"freeze": True}, 1e-6),
    "fp32 partly optimized": ({}, {"leave_out": True}, 1e-6),
    "bf16 ZeRO 1 partly optimized": (
        {"bf16": {"enabled": True}, "zero_optimization": ZERO, **FP32_SUMS},
        {"leave_out": True},
        1e-6,
    ),
    "fp32 unused": ({}, {"unused": True}, 1e-6),
    "fp32 ZeRO 1 unused": ({"zero_optimization": ZERO}, {"unused": True}, 1e-6),
    "bf16 ZeRO 1 unused": (
        {"bf16": {"enabled": True}, "zero_optimization": ZERO, **FP32_SUMS},
        {"unused": True},
        1e-6,
    ),
    "bf16 ZeRO 1 tied, clipping": (
        {
            "bf16": {"enabled": True},
            "zero_optimization": ZERO,
            "gradient_clipping": 0.1,
            **FP32_SUMS,
        },
        {"tied": True},
        1e-6,
    ),
    "fp32 other hooks": ({}, {"hooked": True}, 1e-6),
    "fp16": ({"fp16": {"enabled": True, "initial_scale_power": 8}}, {}, 1e-6),
    "fp32 ZeRO 1": ({"zero_optimization": ZERO}, {}, 1e-6),
    "fp32 ZeRO 1 tied, clipping": (
        {"zero_optimization": ZERO, "gradient_clipping": 0.1},
        {"tied": True},
        1e-6,
    ),
    "fp32 ZeRO 1 not contiguous": (
        {"zero_optimization": {**ZERO, "contiguous_gradients": False}},
        {},
        1e-6,
    ),
    "fp32 ZeRO 1 all-reduce": ({"zero_optimization": {**ZERO, "reduce_scatter": False}}, {}, 1e-6),
    "bf16": ({"bf16": {"enabled": True}}, {}, 1e-2),
    "bf16 ZeRO 1": ({"bf16": {"enabled": True}, "zero_optimization": ZERO, **FP32_SUMS}, {}, 1e-6),
    "bf16 ZeRO 1 sent as fp32": (
        {
            "bf16": {"enabled": True},
            "zero_optimization": ZERO,
            "communication_data_type": "fp32",
            **FP32_SUMS,
        },
        {"tied": True},
        1e-6,
    ),
    "bf16 ZeRO 1 immediate": (
        {
            "bf16": {"enabled": True, "immediate_grad_update": True},
            "zero_optimization": ZERO,
            **FP32_SUMS,
        },
        {"tied": True},
        1e-6,
    ),
    "bf16 ZeRO 1 bf16 sums": ({"bf16": {"enabled": True}, "zero_optimization": ZERO}, {}, 1e-6),
    "fp16 ZeRO 1, overflows skipped": (
        {
            "fp16": {"enabled": True, "initial_scale_power": 17, "hysteresis": 1},
            "zero_optimization": ZERO,
        },
        {},
        1e-6,
    ),
}
#: Cases that each landing trains. The others are exhaustive: a landing trains few of them.
CHOSEN = (
    "fp32",
    "fp32 tied, held until the backward has ended",
    "fp32 checkpointing",
    "fp32 unused",
    "fp32 ZeRO 1 tied, clipping",
    "bf16 ZeRO 1 tied, clipping",
    "fp16 ZeRO 1, overflows skipped",
)


class Trained(NamedTuple):
    """Result of a training run on one rank."""

    losses: list[float]
    #: For each step, the number of buckets that were reduced during the backward pass. None: without holmes.
    early_buckets: list[int | None]
    weights: float  # sum of all weights of this rank's stage
    sent_per_element: (
        float  # elements that the last step reduced, for each trainable element of the stage
    )


def batches(rank_of_data, steps):
    """Yield random bytes of a data-parallel rank, the same in every step so that the loss falls."""
    for number in range(steps * MICRO_BATCHES):
        generator = seeded(10 * rank_of_data + number % MICRO_BATCHES)
        text = torch.randint(0, 256, (MICRO_BATCH, SEQUENCE + 1), generator=generator)
        yield text[:, :-1], text[:, 1:]


def clip_by_value(parameter):
    parameter.grad.clamp_(-0.01, 0.01)


def engine_for(config, options):
    """Return DeepSpeed's pipeline engine for the example's model, with 2 stages.

    Args:
        config: DeepSpeed's configuration, in addition to the one below.
        options: Options of the model:
            tied: the first and the last stage share the embedding's weight
            checkpoint: function that recomputes activations in the backward pass
            leave_out: the optimizer does not get the first parameter
            unused: one parameter never gets a gradient
            hooked: hooks of another library change the gradients
            freeze, held: not used here; see train()
    """
    from deepspeed.pipe import PipelineModule
    from model import layer_specs, next_byte_loss  # the example's

    options = dict(options)
    options.pop("freeze", None)
    options.pop("held", None)
    left_out = 1 if options.pop("leave_out", False) else 0
    checkpoint = options.pop("checkpoint", None)
    unused = options.pop("unused", False)
    hooked = options.pop("hooked", False)
    specs = layer_specs(4, 32, 2, SEQUENCE, options.pop("tied", False))
    with torch.no_grad():
        model = PipelineModule(
            specs,
            num_stages=2,
            loss_fn=next_byte_loss,
            partition_method="uniform",
            seed_layers=True,
            # Without a GPU, torch.manual_seed would also store a traceback for each type of GPU.
            seed_fn=torch.manual_seed if ON_GPUS else torch.default_generator.manual_seed,
            base_seed=1234,
            activation_checkpoint_interval=1 if checkpoint else 0,
            # Reentrant checkpointing would cut an embedding off from its gradient.
            checkpointable_layers=["Block"],
            **({"activation_checkpoint_func": checkpoint} if checkpoint else {}),
        )
    if unused:
        model.forward_funcs[1].register_parameter("spare", torch.nn.Parameter(torch.ones(7)))
    if hooked:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 0.5)
            parameter.register_post_accumulate_grad_hook(clip_by_value)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters())[left_out:],
        config={
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
            **config,
        },
    )
    return engine


@contextlib.contextmanager
def counted_elements(group):
    """Count the elements that all-reduces over `group`, and reductions to owners of shards, transfer.

    The context yields a list with one number, which grows while the context lasts.
    """
    total = [0]
    original_all_reduce = torch.distributed.all_reduce
    original_reduce = ReduceToOwners.reduce

    def all_reduce(tensor, *args, **kwargs):
        if kwargs.get("group") is group:
            total[0] += tensor.numel()
        return original_all_reduce(tensor, *args, **kwargs)

    def reduce(self, flat, spans):
        assert sum(elements for elements, _ in spans) == flat.numel()
        total[0] += flat.numel()
        return original_reduce(self, flat, spans)

    torch.distributed.all_reduce = all_reduce
    ReduceToOwners.reduce = reduce
    try:
        yield total
    finally:
        torch.distributed.all_reduce = original_all_reduce
        ReduceToOwners.reduce = original_reduce


def train(config, options, held=False):
    """Train in this rank, and return the losses and measurements of the overlap (Trained).

    Args:
        config: DeepSpeed's configuration.
        options: Options of the model; see engine_for().
        held: The overlap waits with all reductions until the backward pass has ended.
    """
    engine = engine_for(config, options)
    data = batches(engine.grid.get_data_parallel_rank(), STEPS)
    losses = []
    early_buckets = []
    if held:
        deepspeed_reduce.overlap_of(engine).holds_buckets = True
    for step in range(STEPS):
        if step == 2 and options.get("freeze"):
            # From now on, the first parameter of the stage is not trained.
            next(engine.module.parameters()).requires_grad_(False)
        with counted_elements(engine.mpu.get_data_parallel_group()) as elements:
            losses.append(engine.train_batch(data).item())
        overlap = deepspeed_reduce._overlaps.get(engine)  # None without holmes
        if overlap and overlap.reducer:
            early_buckets.append(overlap.reducer.times.early)
        else:
            early_buckets.append(None)
    weights = sum(p.detach().double().sum().item() for p in engine.module.parameters())
    trainable = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
    return Trained(losses, early_buckets, weights, elements[0] / trainable)


def compare_cases(rank, names):
    """Train each case twice in this rank, without and with the feature "overlap".

    Returns:
        Name of a case -> (Trained without the feature, Trained with it); "not supported" -> not_supported().
    """
    sys.path.insert(0, str(examples() / "deepspeed_pipeline"))
    on_cpu.prepare()
    flat_bucket.DEFAULT_BYTES = 20_000  # several buckets in this small model
    registry = Registry(deepspeed_reduce.PATCHES)
    results = {}
    for name in names:
        config, options, _ = CASES[name]
        with contextlib.redirect_stdout(io.StringIO()):
            stock = train(config, options)
            registry.enable(["overlap"], required=True, disabled=frozenset())
            ours = train(config, options, options.get("held", False))
            registry.undo()
        results[name] = stock, ours
    with contextlib.redirect_stdout(io.StringIO()):
        results["not supported"] = not_supported(rank)
    return results


@pytest.fixture(scope="module")
def results(request):
    """Train the cases of the selected tests in 4 processes, and return the results of each rank by case.

    A case is one configuration of DeepSpeed and of the model. The case "fp32" is always trained, because
    tests of other cases compare with it.
    """
    wanted = {"fp32"}
    for item in request.session.items:
        is_of_this_file = item.module is request.module
        if is_of_this_file and hasattr(item, "callspec"):  # a parametrized test
            wanted.add(item.callspec.params["name"])
    wanted_in_order = [name for name in CASES if name in wanted]
    return run_cases(compare_cases, 4, wanted_in_order, timeout_s=480)


@pytest.mark.parametrize("name", some(CASES, *CHOSEN))
def test_losses_and_weights_are_stock_s(results, name):
    tolerance = CASES[name][2]
    for results_of_rank in results:
        stock, ours = results_of_rank[name]
        assert stock.early_buckets == [None] * STEPS, "stock must not have been patched"
        differences = [abs(a - b) for a, b in zip(stock.losses, ours.losses)]
        assert max(differences) <= tolerance, (stock.losses, ours.losses)
        if tolerance <= 1e-6:
            assert abs(stock.weights - ours.weights) <= 1e-5 * max(1, abs(stock.weights))
        assert stock.losses[-1] < stock.losses[0] - 0.1
        # Every gradient travels once.
        assert ours.sent_per_element == pytest.approx(stock.sent_per_element, rel=0.02)


@pytest.mark.parametrize("name", some(CASES, *CHOSEN))
def test_gradients_left_during_the_last_backward(results, name):
    for results_of_rank in results:
        _, ours = results_of_rank[name]
        early = ours.early_buckets
        # The first step records the order of the gradients, and so does step 2 with other parameters.
        recording_steps = {0, 2} if "frozen" in name else {0}
        for step, count in enumerate(early):
            if step in recording_steps:
                assert count == 0, early
            else:
                assert count > 2, early


class NotSupported(NamedTuple):
    """Result on one rank of a training whose reductions cannot be overlapped."""

    losses: list[float]
    printed: str  # to stderr
    error_if_required: str  # message of the error that --holmes-require overlap raises


def not_supported(rank):
    """Train with sparse gradients, which holmes leaves to DeepSpeed after one message."""
    engine = engine_for({}, {})
    engine.module.forward_funcs[0].sparse = True
    registry = Registry(deepspeed_reduce.PATCHES)
    registry.enable(["overlap"], required=True, disabled=frozenset())
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        data = batches(engine.grid.get_data_parallel_rank(), 2)
        losses = [engine.train_batch(data).item() for _ in range(2)]
    registry.undo()
    deepspeed_reduce._overlaps.clear()
    options = Options(require="overlap", overlap="on")
    plan = build_plan(SITE, Sizes(2), options=options)
    session.set_active(on_cpu.session_of(rank, SITE, plan, options))
    try:
        deepspeed_reduce.overlap_of(engine)
        error_if_required = ""
    except HolmesError as error:
        error_if_required = str(error)
    session.set_active(None)
    return NotSupported(losses, printed.getvalue(), error_if_required)


def test_what_is_not_supported_is_stock_with_a_reason_once(results):
    for rank, results_of_rank in enumerate(results):
        stock, _ = results_of_rank["fp32"]
        losses, printed, error = results_of_rank["not supported"]
        assert losses == stock.losses[:2]
        messages = 1 if rank == 0 else 0
        assert printed.count("not overlapped") == messages
        assert printed.count("sparse gradients") == messages
        assert error.startswith("--holmes-require overlap: "), error
        assert error.endswith(": sparse gradients"), error
