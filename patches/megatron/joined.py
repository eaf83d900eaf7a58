"""Joined jobs of megatron-core: the outer step comes between the inner optimizer's and the copy of the main
weights to the model's (under FP32Optimizer, whose parameters are the model's, after the inner one).

A step that gradients which are not finite prevent does not count. The row is the model's parameters in its
own order, distributed optimizer or not. What is not tried is refused: experts, float8, FSDP, offload.

Jobs of Megatron-LM and Megatron-DeepSpeed read parts of one data set (--holmes-outer part=k/K):

    build_train_valid_test_datasets    asks for K times as many samples: all jobs build the same index of them
    build_pretraining_data_loader      sees samples k, k + K, k + 2 K, ... of it as its data set

So no sample is read twice, whatever the samplers and batch sizes; consumed_samples stay the job's own. The
same index needs the same --train-samples (or iterations x batch) and --seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Running, by_name
from holmes_ext.patches.megatron.features import JOINED, JOINED_LM_DATA, JOINED_MDS_DATA
from holmes_ext.runtime.outer import training
from holmes_ext.runtime.outer.data import part_of
from holmes_ext.runtime.outer.settings import OuterSettings

_OWNER = "megatron-core"


#: The chunks of the model whose optimizer was constructed last.
_chunks: list[Any] = []
#: Not empty while MixedPrecisionOptimizer takes a step that no overflow prevents. Inside it, the inner step
#: comes first, then _copy_main_params_to_model_params().
_mixed_steps = Running()


@by_name
def _remember(call, instance, model_chunks):
    """Remember the model's chunks when get_megatron_optimizer constructs their optimizer.

    They have the names and the order of the weights that joined jobs exchange. The registration comes before
    the torch optimizer inside, whose steps are not counted on their own.
    """
    training.reserve(_OWNER)
    _chunks[:] = model_chunks
    return call()


@by_name
def _step(call, instance):
    """Join the outer training before the first step of megatron-core's optimizer.

    The step() of every optimizer class is wrapped. An optimizer that contains others is called before those,
    so that the adapter is made for the outermost one.
    """
    training.claim(_OWNER, lambda: _adapter(instance))
    return call()


@by_name
def _before_copy(call, instance):
    """Run the outer step after the inner step, before main weights are copied to the model's weights.

    _copy_main_params_to_model_params is called elsewhere too, as after loading a checkpoint: only the call
    inside a step counts.
    """
    if _mixed_steps.instances:
        _stepped()
    return call()


@by_name
def _fp32_step(call, instance):
    """Run the outer step after a step of FP32Optimizer, whose main weights are the model's own."""
    result = call()
    _stepped()
    return result


def _stepped() -> None:
    """Count a step, weighted by the samples that this rank has read, or by 1 if that number is not known.

    It is known if the program uses megatron-core's calculator of micro-batches.
    """
    from megatron.core import num_microbatches_calculator

    if training.owner() != _OWNER:
        return
    calculator = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    samples = 1.0
    if calculator is not None:
        samples = float(calculator.get() * calculator.micro_batch_size)
    training.stepped(samples)


def _adapter(optimizer: Any) -> training.FrameworkAdapter:
    from megatron.core import parallel_state

    sizes = {
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "tensor": parallel_state.get_tensor_model_parallel_world_size(), "chunks": len(_chunks),
    }  # fmt: skip
    return training.FrameworkAdapter(
        "megatron-core", lambda: _weights(_real(optimizer)[0]),
        lambda: next(_chunks[0].parameters()).device,
        agreed={"sizes": sizes}, refusal=lambda settings: refusal(optimizer, settings, sizes),
    )  # fmt: skip


def _real(optimizer: Any) -> list[Any]:
    """The optimizers inside a chained one that step something."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [inner for inner in chained if not inner.is_stub_optimizer]


def refusal(optimizer: Any, settings: OuterSettings, sizes: dict[str, int]) -> str | None:
    real = _real(optimizer)
    if len(real) != 1:
        return f"it has {len(real)} optimizers (experts, or chunks apart), of which one is supported"
    inner = real[0]
    config, ddp = inner.config, getattr(inner, "ddp_config", None)
    if getattr(ddp, "use_megatron_fsdp", False) or getattr(config, "use_precision_aware_optimizer", False):
        return "Megatron-FSDP and the precision-aware optimizer are not supported"
    if getattr(config, "optimizer_cpu_offload", False) or getattr(ddp, "fp8_param_gather", False):
        return "offloaded optimizers and float8 parameters are not supported"
    tied = any(getattr(p, "shared_embedding", False) for chunk in _chunks for p in chunk.parameters())
    return training.refusal_of_copies(settings, sizes, tied)


def _weights(optimizer: Any) -> training.WeightShards:
    from megatron.core import parallel_state

    named = {p: f"chunk {k} {name}" for k, chunk in enumerate(_chunks)
             for name, p in chunk.named_parameters() if p.requires_grad}
    parts, places = [], []
    for p, first, flat in _pieces(optimizer):
        parts.append((named[p], first, flat.detach().view(-1)))
        places.append((flat, flat.data_ptr()))
    tensors = [(name, tuple(p.shape), "float32") for p, name in named.items()]
    stage = parallel_state.get_pipeline_model_parallel_rank()
    position = f"pipeline {stage}, tensor {parallel_state.get_tensor_model_parallel_rank()}"
    return training.WeightShards(position, tensors, parts,
                                 lambda: any(flat.data_ptr() != at for flat, at in places))


def _pieces(optimizer: Any) -> Iterator[tuple[Any, int, Any]]:
    """Each parameter that this rank steps something of, the first element of that, and the main weights."""
    distributed = hasattr(optimizer, "shard_fp32_from_float16_groups")
    if distributed:
        pairs = [(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
                 (optimizer.model_fp32_groups, optimizer.shard_fp32_groups)]
    elif hasattr(optimizer, "fp32_from_float16_groups"):
        pairs = [(optimizer.float16_groups, optimizer.fp32_from_float16_groups),
                 (optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups)]
    else:
        groups = [group["params"] for group in optimizer.optimizer.param_groups]
        pairs = [(groups, groups)]
    for models, mains in pairs:
        for model_group, main_group in zip(models, mains):
            for p, main in zip(model_group, main_group):
                yield p, optimizer._get_model_param_range_map(p)["param"].start if distributed else 0, main


@by_name
def _enlarge(call, instance, build_train_valid_test_datasets_provider):
    """Build data sets that are large enough for all joined jobs together.

    build_train_valid_test_datasets calls the program's provider with the numbers of samples that this job
    needs. Here they are multiplied by the number of jobs, so that all jobs build the same index of samples.
    Each job then reads its part of the index (_share_out).
    """
    _, parts = training.part()
    if parts == 1:
        return call()

    def provider(numbers, *others, **named):
        enlarged = [None if number is None else number * parts for number in numbers]
        return build_train_valid_test_datasets_provider(type(numbers)(enlarged), *others, **named)

    return call(build_train_valid_test_datasets_provider=provider)


@by_name
def _share_out(call, instance, dataset):
    """Construct the data loader for this job's part of the data set.

    build_pretraining_data_loader then samples only every K-th sample, with K joined jobs.
    """
    return call(dataset=part_of(dataset))


_OPTIMIZER = "megatron.core.optimizer.optimizer:"
_COPY = "_copy_main_params_to_model_params"
OPTIMIZER_STEPS = tuple(f"{_OPTIMIZER}{name}.step"
                        for name in ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer"))
PATCHES = (
    Patch(JOINED, "megatron.core.optimizer:get_megatron_optimizer", "names and order of the weights",
          _remember),
    *(Patch(JOINED, target, "before the first step the job joins", _step) for target in OPTIMIZER_STEPS),
    Patch(JOINED, f"{_OPTIMIZER}MixedPrecisionOptimizer.step_with_ready_grads", "only in a real step",
          _mixed_steps),
    *(Patch(JOINED, f"{holder}.{_COPY}", "main weights are new here", _before_copy)
      for holder in (f"{_OPTIMIZER}Float16OptimizerWithFloat16Params",
                     "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer")),
    Patch(JOINED, f"{_OPTIMIZER}FP32Optimizer.step_with_ready_grads", "the weights are new here", _fp32_step),
    *(Patch(feature, f"{module}:build_train_valid_test_datasets",
            "the jobs' parts together are the data set", _enlarge)
      for feature, module in ((JOINED_LM_DATA, "megatron.training.training"),
                              (JOINED_MDS_DATA, "megatron.training"))),
    *(Patch(feature, f"{module}.data_samplers:build_pretraining_data_loader",
            "joined jobs read different parts of one data set", _share_out)
      for feature, module in ((JOINED_LM_DATA, "megatron.training.datasets"),
                              (JOINED_MDS_DATA, "megatron.data"))),
)  # fmt: skip
