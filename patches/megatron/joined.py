"""Joined jobs of megatron-core: after the inner optimizer's step, before model weights are copied from main
weights.

    get_megatron_optimizer                     the model's chunks: names and order of the row
    step() of the outermost optimizer          before the first one: join
    inner step -> [outer step] -> copy to the model's weights -> all-gather of the distributed optimizer,
                                               overlapped or not
    FP32Optimizer                              its parameters are the model's: after the inner step

Gradients that are not finite keep step() from stepping, so such a step does not count. The row is the model's
parameters in its own order, whether the optimizer is distributed or not. What is not tried is refused:
experts, float8, FSDP, offload.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.megatron.features import JOINED
from holmes_ext.runtime.outer import training
from holmes_ext.runtime.outer.settings import OuterSettings

_OWNER = "megatron-core"


class _State:
    """chunks: of the model whose optimizer was made last; stepping: inside a real step."""

    chunks: list[Any] = []
    stepping = False


def _remember(wrapped, instance, args, kwargs):
    """get_megatron_optimizer(config, model_chunks, ...)."""
    training.reserve(_OWNER)
    _State.chunks = list(kwargs["model_chunks"] if "model_chunks" in kwargs else args[1])
    return wrapped(*args, **kwargs)


def _step(wrapped, instance, args, kwargs):
    """Of any optimizer; the outermost comes first."""
    training.claim(_OWNER, lambda: _adapter(instance))
    return wrapped(*args, **kwargs)


def _mixed_step(wrapped, instance, args, kwargs):
    """MixedPrecisionOptimizer.step_with_ready_grads: inner step, then _copy_main_params_to_model_params()."""
    _State.stepping = True
    try:
        return wrapped(*args, **kwargs)
    finally:
        _State.stepping = False


def _before_copy(wrapped, instance, args, kwargs):
    if _State.stepping and training.owner() == _OWNER:
        training.stepped(_samples())
    return wrapped(*args, **kwargs)


def _fp32_step(wrapped, instance, args, kwargs):
    """FP32Optimizer.step_with_ready_grads."""
    done = wrapped(*args, **kwargs)
    if training.owner() == _OWNER:
        training.stepped(_samples())
    return done


def _samples() -> float:
    """That this rank has read for a step, where megatron-core's calculator knows them."""
    from megatron.core import num_microbatches_calculator as calculator

    known = calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    return float(known.get() * known.micro_batch_size) if known is not None else 1.0


def _adapter(optimizer: Any) -> training.FrameworkAdapter:
    from megatron.core import parallel_state

    sizes = {
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "tensor": parallel_state.get_tensor_model_parallel_world_size(), "chunks": len(_State.chunks),
    }  # fmt: skip
    return training.FrameworkAdapter(
        "megatron-core", lambda: _weights(_only(optimizer)),
        lambda: next(_State.chunks[0].parameters()).device,
        agreed={"sizes": sizes}, refusal=lambda settings: refusal(optimizer, settings, sizes),
    )  # fmt: skip


def _real(optimizer: Any) -> list[Any]:
    """The optimizers inside a chained one that step something."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [inner for inner in chained if not inner.is_stub_optimizer]


def _only(optimizer: Any) -> Any:
    return _real(optimizer)[0]


def refusal(optimizer: Any, settings: OuterSettings, sizes: dict[str, int]) -> str | None:
    if len(_real(optimizer)) != 1:
        count = len(_real(optimizer))
        return f"it has {count} optimizers (experts, or chunks apart), of which one is supported"
    inner = _only(optimizer)
    config, ddp = inner.config, getattr(inner, "ddp_config", None)
    if getattr(ddp, "use_megatron_fsdp", False) or getattr(config, "use_precision_aware_optimizer", False):
        return "Megatron-FSDP and the precision-aware optimizer are not supported"
    if getattr(config, "optimizer_cpu_offload", False) or getattr(ddp, "fp8_param_gather", False):
        return "offloaded optimizers and float8 parameters are not supported"
    tied = any(getattr(p, "shared_embedding", False) for chunk in _State.chunks for p in chunk.parameters())
    return training.refusal_of_copies(settings, sizes, tied)


def _weights(optimizer: Any) -> training.WeightShards:
    from megatron.core import parallel_state

    named = {p: f"chunk {k} {name}" for k, chunk in enumerate(_State.chunks)
             for name, p in chunk.named_parameters()
             if p.requires_grad}  # fmt: skip
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
    if hasattr(optimizer, "shard_fp32_from_float16_groups"):  # distributed
        pairs = ((optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
                 (optimizer.model_fp32_groups, optimizer.shard_fp32_groups))  # fmt: skip
        for models, shards in pairs:
            for model_group, shard_group in zip(models, shards):
                for p, shard in zip(model_group, shard_group):
                    yield p, optimizer._get_model_param_range_map(p)["param"].start, shard
    elif hasattr(optimizer, "fp32_from_float16_groups"):
        for models, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups):
            for p, main in zip(models, mains):
                yield p, 0, main
        for group in optimizer.fp32_from_fp32_groups:
            for p in group:
                yield p, 0, p
    else:
        for group in optimizer.optimizer.param_groups:
            for p in group["params"]:
                yield p, 0, p


_OPTIMIZER = "megatron.core.optimizer.optimizer:"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_COPY = "_copy_main_params_to_model_params"
PATCHES = (
    Patch(JOINED, "megatron.core.optimizer:get_megatron_optimizer", "names and order of the weights",
          _remember, parameters=("model_chunks",)),
    *(Patch(JOINED, f"{_OPTIMIZER}{name}.step", "before the first step the job joins", _step)
      for name in ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")),
    Patch(JOINED, f"{_OPTIMIZER}MixedPrecisionOptimizer.step_with_ready_grads", "only in a real step",
          _mixed_step),
    Patch(JOINED, f"{_OPTIMIZER}Float16OptimizerWithFloat16Params.{_COPY}", "main weights are new here",
          _before_copy),
    Patch(JOINED, f"{_DISTRIBUTED}.{_COPY}", "main weights are new here", _before_copy),
    Patch(JOINED, f"{_OPTIMIZER}FP32Optimizer.step_with_ready_grads", "the weights are new here", _fp32_step),
)  # fmt: skip
