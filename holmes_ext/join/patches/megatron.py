"""Joins training jobs of megatron-core: several jobs that train the same model exchange weights.

Each job takes inner steps with its own optimizer. Every few inner steps, an outer step combines the jobs'
changes of the weights (as in DiLoCo; holmes_ext/join). This module wraps three kinds of functions:

    get_megatron_optimizer               remember the model's parameters, equal in all jobs by name and order
    step() of each optimizer class       join the other jobs, before the first step
    _copy_main_params_to_model_params    run the outer step. The inner step has just changed the main weights
                                         (float32); now they are copied to the model's weights.

FP32Optimizer copies nothing: the outer step follows its inner step.

A step that overflow prevents does not count. Models with experts, float8 parameters, Megatron-FSDP or
offloaded optimizers are refused.

Joined jobs of Megatron-LM and Megatron-DeepSpeed can share a data set (--holmes-outer part=k/K):

    build_train_valid_test_datasets    builds K times the samples, so that all jobs have the same index
    build_pretraining_data_loader      sees samples k, k + K, k + 2 K, ... of it

Thus no sample is read twice, whatever the jobs' batch sizes. The jobs need equal --train-samples (or
iterations x batch) and --seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holmes_ext.join import training
from holmes_ext.join.data import part_of
from holmes_ext.join.settings import OuterSettings
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Running, by_name
from holmes_ext.patches.megatron.features import (
    JOINED,
    JOINED_LM_DATA,
    JOINED_MDS_DATA,
    OPTIMIZER_STEPS,
)

#: The owner of the job's steps: the framework that has called training.reserve() first. Its optimizer's steps
#: count as steps of the job.
_OWNER = "megatron-core"

#: The chunks of the model for the optimizer that was constructed last.
_chunks: list[Any] = []
#: Its list of instances is not empty while MixedPrecisionOptimizer takes a step that no overflow prevents.
#: Such a step runs the inner optimizer, then _copy_main_params_to_model_params().
_mixed_steps = Running()


@by_name
def _remember_chunks(call, instance, model_chunks):
    """Remember the chunks of the model, because joined jobs exchange their parameters.

    Wrapper of get_megatron_optimizer; call() runs the original. That function constructs the optimizer of
    these chunks, around an optimizer of torch. Because of reserve(), only the steps of megatron-core's
    optimizer count as steps of the job, not those of torch's optimizer.
    """
    # Only the first framework of this process that calls reserve() gets the steps.
    training.reserve(_OWNER)
    _chunks[:] = model_chunks
    return call()


@by_name
def _join_before_step(call, instance):
    """Join the jobs with which this job exchanges weights, before the optimizer's first step.

    Wrapper of step() of each optimizer class; call() runs the original. A chained optimizer steps other
    optimizers inside its own step(). claim() only acts in the first call: that of the outermost optimizer.
    """
    # Only steps of the first framework of the process that calls reserve() count for the outer training. If
    # that is megatron-core, the first claim() joins the other jobs, and calls _adapter() for that.
    training.claim(_OWNER, lambda: _adapter(instance))
    return call()


@by_name
def _outer_step_before_copy(call, instance):
    """Run the outer step (it combines the weights of joined jobs) before main weights are copied.

    Wrapper of _copy_main_params_to_model_params; call() runs the original. That copies the float32 main
    weights to the model's weights. A call outside an optimizer step, such as after loading a checkpoint, runs
    no outer step.
    """
    is_in_step = bool(_mixed_steps.instances)  # the optimizers whose step runs now
    if is_in_step:
        _report_step()  # runs the outer step, if it is time
    return call()


@by_name
def _outer_step_after_step(call, instance):
    """Run the outer step (it combines the weights of joined jobs) after a step of FP32Optimizer.

    Wrapper of FP32Optimizer.step_with_ready_grads; call() runs the original. That optimizer steps the model's
    own weights. Therefore nothing is copied afterwards.
    """
    result = call()
    _report_step()
    return result


def _report_step() -> None:
    """Report a finished inner step to the outer training, and let it run an outer step if it is time.

    The outer step weights each job by the samples that it has read. Their number comes from megatron-core's
    calculator of micro-batches. If the program does not use that calculator, each step has weight 1.
    """
    from megatron.core import num_microbatches_calculator

    # owner() returns the framework whose steps count for the outer training; None: this job trains alone.
    counts_as_step_of_job = training.owner() == _OWNER
    if not counts_as_step_of_job:
        return
    calculator = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    samples = 1.0
    if calculator is not None:
        samples = float(calculator.get() * calculator.micro_batch_size)
    training.stepped(samples)


def _adapter(optimizer: Any) -> training.FrameworkAdapter:
    """Return callbacks that give the outer training access to this rank's weights.

    The outer training exchanges weights with other jobs. It first calls refusal(); the result is the
    reason why this job cannot do that, or None. Then it calls weights(). The model is taken from the
    global `_chunks` (virtual pipeline stages), set by _remember_chunks().

    Args:
        optimizer: The optimizer of megatron-core; it may be a chain of several.
    """
    from megatron.core import parallel_state

    sizes = {
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "chunks": len(_chunks),
    }
    return training.FrameworkAdapter(
        "megatron-core",
        # refusal() accepts exactly one optimizer, so the first is the only one.
        weights=lambda: _weights(_stepping_optimizers(optimizer)[0]),
        device=lambda: next(_chunks[0].parameters()).device,
        optimizer=optimizer,
        agreed={"sizes": sizes},  # must be equal in all joined jobs
        refusal=lambda settings: refusal(optimizer, settings, sizes),
    )


def _stepping_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers in a chained optimizer that have parameters to step on this rank."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [inner for inner in chained if not inner.is_stub_optimizer]


def refusal(optimizer: Any, settings: OuterSettings, sizes: dict[str, int]) -> str | None:
    """Return why a job with this optimizer cannot exchange weights with other jobs, or None if it can.

    Args:
        optimizer: The optimizer of megatron-core; it may be a chain of several.
        settings: Settings of the exchange between jobs (--holmes-outer).
        sizes: Number of pipeline stages, tensor-parallel ranks and chunks of the model, by name.
    """
    optimizers = _stepping_optimizers(optimizer)
    # Exactly one optimizer is supported. There are several with experts, or with an optimizer for each
    # chunk of the model, and none if this rank steps no parameters.
    if len(optimizers) != 1:
        return f"it has {len(optimizers)} optimizers (experts, or chunks apart), of which one is supported"
    inner = optimizers[0]
    config = inner.config
    ddp_config = getattr(inner, "ddp_config", None)
    if getattr(ddp_config, "use_megatron_fsdp", False):
        return "Megatron-FSDP and the precision-aware optimizer are not supported"
    if getattr(config, "use_precision_aware_optimizer", False):
        return "Megatron-FSDP and the precision-aware optimizer are not supported"
    if getattr(config, "optimizer_cpu_offload", False) or getattr(
        ddp_config, "fp8_param_gather", False
    ):
        return "offloaded optimizers and float8 parameters are not supported"
    parameters = [parameter for chunk in _chunks for parameter in chunk.parameters()]
    is_tied = any(getattr(parameter, "shared_embedding", False) for parameter in parameters)
    return training.refusal_of_copies(settings, sizes, is_tied)


def _weights(optimizer: Any) -> training.WeightShards:
    """Return the float32 weights that this rank's optimizer updates, as flat views.

    These "main weights" are the master copies if the model is bf16 or fp16. The outer training
    writes into the views.

    Args:
        optimizer: A single optimizer of megatron-core.
    """
    from megatron.core import parallel_state

    names = {}  # parameter -> name, in the model's order
    for index, chunk in enumerate(_chunks):
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                names[parameter] = f"chunk {index} {name}"

    parts = []  # name, index of the first element, flat view of the main weights
    addresses = []  # main weights, and the address of their first element
    for parameter, first_element, main in _main_weights(optimizer):
        parts.append((names[parameter], first_element, main.detach().view(-1)))
        addresses.append((main, main.data_ptr()))

    def have_moved() -> bool:
        """Return whether megatron-core has moved the main weights since _weights() made its views.

        The parts are views of the old memory, so the outer step would then change nothing.
        """
        return any(main.data_ptr() != address for main, address in addresses)

    tensors = [(name, tuple(parameter.shape), "float32") for parameter, name in names.items()]
    stage = parallel_state.get_pipeline_model_parallel_rank()
    position = f"pipeline {stage}, tensor {parallel_state.get_tensor_model_parallel_rank()}"
    return training.WeightShards(position=position, tensors=tensors, parts=parts, moved=have_moved)


def _main_weights(optimizer: Any) -> Iterator[tuple[Any, int, Any]]:
    """Yield the float32 weights that this rank's optimizer updates: a tensor for each parameter.

    If the model is bf16 or fp16, these "main weights" are the optimizer's master copies.

    Yields:
        Parameter of the model; index of its first element that this rank updates (above 0 only with
        the distributed optimizer); float32 tensor of the elements that this rank updates.
    """
    is_distributed = hasattr(optimizer, "shard_fp32_from_float16_groups")
    if is_distributed:
        pairs = [
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        ]
    elif hasattr(optimizer, "fp32_from_float16_groups"):
        pairs = [
            (optimizer.float16_groups, optimizer.fp32_from_float16_groups),
            (optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups),
        ]
    else:  # FP32Optimizer: the model's weights are the main weights
        groups = [group["params"] for group in optimizer.optimizer.param_groups]
        pairs = [(groups, groups)]
    for model_groups, main_groups in pairs:
        for model_group, main_group in zip(model_groups, main_groups):
            for parameter, main in zip(model_group, main_group):
                first_element = 0
                if is_distributed:
                    first_element = optimizer._get_model_param_range_map(parameter)["param"].start
                yield parameter, first_element, main


@by_name
def _enlarge(call, instance, build_train_valid_test_datasets_provider):
    """Build data sets that are large enough for all joined jobs together.

    Wrapper of build_train_valid_test_datasets; call() runs the original. That function calls the program's
    provider of data sets with the numbers of samples that a single job needs. Joined jobs train the same
    model. With --holmes-outer part=k/K, each of K jobs reads every K-th sample of the same data set. So the
    numbers are multiplied by K here, and all jobs build the same index of samples.
    """
    _, job_count = training.data_part()  # k and K of --holmes-outer part=k/K
    if job_count == 1:
        return call()

    def provider(numbers, *args, **kwargs):
        """Call the program's provider with K times the numbers of samples (train, validation, test)."""
        # None stands for all samples of a data set. The provider gets a list or a tuple, like `numbers`.
        enlarged = [None if number is None else number * job_count for number in numbers]
        return build_train_valid_test_datasets_provider(type(numbers)(enlarged), *args, **kwargs)

    return call(build_train_valid_test_datasets_provider=provider)


@by_name
def _share_out(call, instance, dataset):
    """Construct the data loader with this job's part of the data set.

    Wrapper of build_pretraining_data_loader; call() runs the original. If K jobs share the data set, the part
    has every K-th sample; else it is the whole data set.
    """
    return call(dataset=part_of(dataset))


_OPTIMIZER = "megatron.core.optimizer.optimizer:"
_COPY = "_copy_main_params_to_model_params"
PATCHES = (
    Patch(
        JOINED,
        "megatron.core.optimizer:get_megatron_optimizer",
        "names and order of the weights",
        _remember_chunks,
    ),
    *(
        Patch(JOINED, target, "before the first step the job joins", _join_before_step)
        for target in OPTIMIZER_STEPS
    ),
    Patch(
        JOINED,
        f"{_OPTIMIZER}MixedPrecisionOptimizer.step_with_ready_grads",
        "only in a real step",
        _mixed_steps,
    ),
    *(
        Patch(JOINED, f"{holder}.{_COPY}", "main weights are new here", _outer_step_before_copy)
        for holder in (
            f"{_OPTIMIZER}Float16OptimizerWithFloat16Params",
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",
        )
    ),
    Patch(
        JOINED,
        f"{_OPTIMIZER}FP32Optimizer.step_with_ready_grads",
        "the weights are new here",
        _outer_step_after_step,
    ),
    *(
        Patch(
            feature,
            f"{module}:build_train_valid_test_datasets",
            "the jobs' parts together are the data set",
            _enlarge,
        )
        for feature, module in (
            (JOINED_LM_DATA, "megatron.training.training"),
            (JOINED_MDS_DATA, "megatron.training"),
        )
    ),
    *(
        Patch(
            feature,
            f"{module}.data_samplers:build_pretraining_data_loader",
            "joined jobs read different parts of one data set",
            _share_out,
        )
        for feature, module in (
            (JOINED_LM_DATA, "megatron.training.datasets"),
            (JOINED_MDS_DATA, "megatron.data"),
        )
    ),
)
