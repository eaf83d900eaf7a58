"""--holmes-profile under megatron-core, whose schedules call forward_step, backward_step and p2p.

    a step     from one call of a forward_backward schedule to the next; "optimizer": all that lies between
    "reduce"   config.finalize_model_grads_func: what is left of the reduction, and the embeddings' all-reduce

The interleaved schedule runs a stage's layers in chunks, which the partition's costs do not describe."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name, inside, with_session
from holmes_ext.patches.megatron.features import P2P_MODULE, PROFILE, SCHEDULES, loaded_version
from holmes_ext.runtime import session
from holmes_ext.runtime.measure.profile_file import publish
from holmes_ext.runtime.measure.profiler import Profiler, profiler


class _State:
    """Of this process: its profiler while it measures; done once the profile is written."""

    profiler: Profiler | None = None
    open = ExitStack()  # the step, and what lies between its schedule and the next
    done = False


state = _State()


def layers_of(model: Any) -> list[tuple[str | int, Any]]:
    """(label, module) of one stage's model, as they run: embedding, layers, what follows the last one."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    modules = dict(model.named_modules())
    embeddings = [name for name in modules if name.endswith("embedding") and name.count("embedding") == 1]
    last = ("final_layernorm", "final_norm", "output_layer")
    return [
        *(("before", modules[name]) for name in embeddings),
        *((module.layer_number - 1, module) for module in modules.values()
          if isinstance(module, TransformerLayer)),
        *(("after", module) for name, module in modules.items()
          if name.rpartition(".")[2] in last and module is not None),
    ]


def gradient_bytes(model: Any) -> dict[str | int, float]:
    """Bytes of each layer's gradients in the reduction: in 32 bits unless the program chose otherwise."""
    wide = getattr(getattr(model, "ddp_config", None), "grad_reduce_in_fp32", True)
    by_label: dict[str | int, float] = {}
    counted: set[int] = set()
    for label, module in layers_of(model):
        new = [p for p in module.parameters() if p.requires_grad and id(p) not in counted]
        counted.update(map(id, new))
        size = sum(p.numel() * (4 if wide else p.element_size()) for p in new)
        by_label[label] = by_label.get(label, 0.0) + size
    return by_label


@with_session
@by_name
def _schedule(current, call, instance, model, num_microbatches, seq_length, micro_batch_size, forward_only):
    """Measure a training step, from the start of its schedule to the start of the next one.

    megatron-core's forward_backward functions run the passes of one step; the program then calls the
    optimizer by itself. Therefore a step stays open when its schedule returns, as a span named "optimizer",
    and ends when the next schedule begins. After the last measured step the profile is written.

    The schedule calls config.finalize_model_grads_func to reduce gradients: while it runs, that is a function
    which measures the reduction.

    Raises:
        HolmesError: the schedule is interleaved, which the profile does not describe.
    """
    if state.done or forward_only:
        return call()
    from megatron.core.utils import get_model_config

    if isinstance(model, list):
        if len(model) > 1:
            raise HolmesError("--holmes-profile: the interleaved schedule is not measured; run with one "
                              "chunk on each stage, and give the layers of each chunk")
        model = model[0]
    if state.profiler is None:
        state.profiler = profiler(current.options.profile_steps)
        state.profiler.watch(layers_of(model))
    else:
        state.open.close()
    prof = state.profiler
    config = get_model_config(model)
    if prof.finished:
        state.profiler, state.done = None, True
        prof.release()
        _publish(current, model, config, prof, num_microbatches, tokens=seq_length * micro_batch_size)
        return call()
    state.open.enter_context(prof.step())
    finalize = config.finalize_model_grads_func

    def timed_finalize(*args, **kwargs):
        with prof.span("reduce"):
            return finalize(*args, **kwargs)

    if finalize is not None:
        config.finalize_model_grads_func = timed_finalize
    try:
        result = call()
    finally:
        config.finalize_model_grads_func = finalize
    state.open.enter_context(prof.span("optimizer"))
    return result


def _publish(
    current: session.Session, model: Any, config: Any, prof: Profiler, micro_batches: int, tokens: int
) -> None:
    """Write the profile of all stages; a collective over all ranks.

    Args:
        tokens: Tokens of one micro-batch, before context parallelism divides them.
    """
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    tensor = parallel_state.get_tensor_model_parallel_world_size()
    width = (config.pipeline_dtype or torch.float32).itemsize
    context = parallel_state.get_context_parallel_world_size()
    rank_tokens = tokens // context
    parts = tensor if config.sequence_parallel else 1
    ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    report = {
        "framework": f"megatron-core {loaded_version()}",
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "tensor": tensor, "micro_batches": micro_batches,
        "activation_bytes": rank_tokens * config.hidden_size * width // parts,
    }  # fmt: skip
    publish(
        current, prof, report, stages=len(ranks), gradient_bytes=gradient_bytes(model),
        group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        device=next(model.parameters()).device, send=lambda activation, to: dist.send(activation, ranks[to]),
        receive=lambda activation, source: dist.recv(activation, ranks[source]),
    )  # fmt: skip


def _during(kind: str):
    """Return a wrapper that measures its function as a span of this kind, while a profile is measured."""
    return inside(lambda: state.profiler.span(kind) if state.profiler is not None else nullcontext())


PATCHES = (
    *(Patch(PROFILE, f"{SCHEDULES}:forward_backward_{name}", "--holmes-profile: where a step begins",
            _schedule)
      for name in ("no_pipelining", "pipelining_without_interleaving", "pipelining_with_interleaving")),
    *(Patch(PROFILE, f"{SCHEDULES}:{kind}_step", f"--holmes-profile: one micro-batch {kind}", _during(kind))
      for kind in ("forward", "backward")),
    *(Patch(PROFILE, f"{P2P_MODULE}:{holder}{name}", "--holmes-profile: sends and receives, with waiting",
            _during("receive" if "recv" in name else "send"), only=only)
      for holder, only in (("", "<0.14"), ("P2PCommunicator.", ">=0.14"))
      for name in ("recv_forward", "recv_backward", "send_forward", "send_backward",
                   "send_forward_recv_backward", "send_backward_recv_forward")),
)  # fmt: skip
