"""Measures layers, messages and gradient reductions of a megatron-core job, for --holmes-profile.

--holmes-profile N measures N training steps and writes a profile. `holmes plan --profile` plans from it.
The measuring itself is done by a Profiler (holmes_ext/runtime/measure/profiler.py). This module reports to
the Profiler when each part of a step begins and ends:

    step                 from the start of a forward_backward schedule to the start of the next one
    forward, backward    forward_step and backward_step of one micro-batch; the Profiler divides the time over
                         the layers
    send, receive        functions or methods of megatron-core's p2p_communication, including waiting
    reduce               config.finalize_model_grads_func: the part of the gradient reduction that no backward
                         pass hides, and the all-reduce of shared embeddings
    optimizer            from the end of a schedule to the start of the next one

The interleaved schedule is refused: it runs a stage's layers in chunks, and a profile cannot describe these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name, inside, with_session
from holmes_ext.patches.megatron.features import P2P_MODULE, PROFILE, SCHEDULES, loaded_version
from holmes_ext.runtime.measure.profile_file import publish
from holmes_ext.runtime.measure.profiler import Profiler, profiler
from holmes_ext.runtime.session import Session


class _State:
    """State of the measurement for --holmes-profile in this process."""

    #: None before the first step, and after the profile has been written.
    profiler: Profiler | None = None
    #: Spans that stay open when the wrapper of a schedule returns: the step and its part "optimizer". The
    #: wrapper closes them when the next schedule begins.
    open_spans = ExitStack()
    is_finished = False  # whether the profile has been written


state = _State()


def layers_of(model: Any) -> list[tuple[str | int, Any]]:
    """Return the layers of one pipeline stage's model, in the order of the forward pass.

    The profile sums times and gradient bytes of the layers with the same label.

    Returns:
        (label, module) of each layer. The label is "before" for embeddings, the number of a transformer layer
        in the whole model (from 0), and "after" for the final norm and the output layer.
    """
    from megatron.core.transformer.transformer_layer import TransformerLayer

    modules = dict(model.named_modules())  # by full name, such as "decoder.layers.0"
    embeddings: list[tuple[str | int, Any]] = []
    transformer_layers: list[tuple[str | int, Any]] = []
    last_layers: list[tuple[str | int, Any]] = []
    for name, module in modules.items():
        # An embedding can contain others, such as "embedding.word_embeddings". Only the outermost is
        # returned: the time of the inner ones is part of its time.
        is_outermost_embedding = name.endswith("embedding") and name.count("embedding") == 1
        if is_outermost_embedding:
            embeddings.append(("before", module))
        if isinstance(module, TransformerLayer):
            transformer_layers.append((module.layer_number - 1, module))  # layer_number starts at 1
        last_part = name.rpartition(".")[2]
        if last_part in ("final_layernorm", "final_norm", "output_layer"):
            last_layers.append(("after", module))
    return [*embeddings, *transformer_layers, *last_layers]


def gradient_bytes(model: Any) -> dict[str | int, float]:
    """Return how many bytes of gradients each layer of a pipeline stage adds to the gradient reduction.

    Gradients have 4 bytes an element, or the parameter's type if the program set grad_reduce_in_fp32=False. A
    parameter that several layers share counts only for the first one.

    Returns:
        Label of a layer (see layers_of) -> bytes.
    """
    ddp_config = getattr(model, "ddp_config", None)
    is_float32 = getattr(ddp_config, "grad_reduce_in_fp32", True)
    by_label: dict[str | int, float] = {}
    counted: set[int] = set()  # ids of parameters
    for label, module in layers_of(model):
        by_label.setdefault(label, 0.0)
        for parameter in module.parameters():
            if not parameter.requires_grad or id(parameter) in counted:
                continue
            counted.add(id(parameter))
            element_bytes = 4 if is_float32 else parameter.element_size()
            by_label[label] += parameter.numel() * element_bytes
    return by_label


@with_session
@by_name
def _schedule(
    current: Session,
    call: Call,
    instance: Any,
    model: Any,
    num_microbatches: Any,
    seq_length: Any,
    micro_batch_size: Any,
    forward_only: Any,
) -> Any:
    """Measure a training step, from the start of its schedule to the start of the next one.

    This wrapper runs in place of megatron-core's forward_backward functions; call() runs the original. Such a
    function runs the passes of one step. The program then calls the optimizer itself. Therefore the step's
    span stays open when this wrapper returns, and its next call closes the span. After the last measured
    step, that call writes the profile.

    Raises:
        HolmesError: the schedule is interleaved. A profile cannot describe that.
    """
    if state.is_finished or forward_only:  # forward_only: evaluation
        return call()
    from megatron.core.utils import get_model_config

    if isinstance(model, list):
        if len(model) > 1:
            raise HolmesError(
                "--holmes-profile: the interleaved schedule is not measured; run with one "
                "chunk on each stage, and give the layers of each chunk"
            )
        model = model[0]
    if state.profiler is None:  # the first step: start to measure
        state.profiler = profiler(current.options.profile_steps)
        # Add hooks that divide the time of a pass among these layers.
        state.profiler.watch(layers_of(model))
    else:  # a later step: the optimizer has run since, so the previous step and its "optimizer" span end
        state.open_spans.close()
    prof = state.profiler
    config = get_model_config(model)
    if prof.finished:  # the step that has just ended was the last measured one
        state.profiler = None
        state.is_finished = True
        prof.release()  # remove the hooks from the layers
        _publish(
            current, model, config, prof, num_microbatches, tokens=seq_length * micro_batch_size
        )
        return call()
    state.open_spans.enter_context(prof.step())  # this step begins
    with _timed_reduction(config, prof):
        result = call()
    state.open_spans.enter_context(prof.span("optimizer"))  # until the next schedule begins
    return result


@contextmanager
def _timed_reduction(config: Any, prof: Profiler) -> Iterator[None]:
    """Measure the gradient reduction of a schedule that runs within this context.

    The schedule reduces gradients by calling config.finalize_model_grads_func. Within the context,
    this attribute is another function: it calls the program's function and records its time as
    "reduce". At the end, the attribute is the program's function again.

    Args:
        config: The model's configuration, with finalize_model_grads_func. If that is None, nothing
            is measured.
        prof: Records the time.
    """
    finalize = config.finalize_model_grads_func

    def timed_finalize(*args: Any, **kwargs: Any) -> Any:
        """Call the program's function to reduce the gradients, and record its time as "reduce"."""
        with prof.span("reduce"):
            return finalize(*args, **kwargs)

    if finalize is not None:
        config.finalize_model_grads_func = timed_finalize
    try:
        yield
    finally:
        config.finalize_model_grads_func = finalize


def _publish(
    current: Session,
    model: Any,
    config: Any,
    prof: Profiler,
    micro_batches: int,
    tokens: int,
) -> None:
    """Time the communication while nothing computes, and write the profile of all pipeline stages.

    The profile is a file with the times of layers, stages and communication, which `holmes plan`
    reads. All ranks must call this function, after the last profiled training step.

    Args:
        model: The model of this rank's stage.
        config: The model's configuration.
        prof: The times of the training steps, measured on this rank.
        micro_batches: Number of micro-batches in a step.
        tokens: Tokens of one micro-batch, before context parallelism divides them.
    """
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    tensor_parallel_size = parallel_state.get_tensor_model_parallel_world_size()
    element_bytes = (config.pipeline_dtype or torch.float32).itemsize  # of an activation
    rank_tokens = tokens // parallel_state.get_context_parallel_world_size()

    # With sequence parallelism, a tensor-parallel rank has only its part of an activation.
    activation_parts = tensor_parallel_size if config.sequence_parallel else 1
    ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    report = {
        "framework": f"megatron-core {loaded_version()}",
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "tensor": tensor_parallel_size,
        "micro_batches": micro_batches,
        "activation_bytes": rank_tokens * config.hidden_size * element_bytes // activation_parts,
    }
    publish(
        current,
        prof,
        report,
        stages=len(ranks),
        gradient_bytes=gradient_bytes(model),
        # publish() times a gradient reduction in this group.
        group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        device=next(model.parameters()).device,
        # publish() times these transfers of a tensor of activation_bytes to or from a stage.
        send=lambda activation, stage: dist.send(activation, ranks[stage]),
        receive=lambda activation, stage: dist.recv(activation, ranks[stage]),
    )


def _during(kind: str) -> Callable[..., Any]:
    """Return a wrapper that records each run of the wrapped function in the profile.

    Args:
        kind: Kind of span in the profile, such as "forward" or "send".
    """
    return inside(
        lambda: state.profiler.span(kind) if state.profiler is not None else nullcontext()
    )


PATCHES = (
    *(
        Patch(
            PROFILE,
            f"{SCHEDULES}:forward_backward_{name}",
            "--holmes-profile: a training step begins here",
            _schedule,
        )
        for name in (
            "no_pipelining",
            "pipelining_without_interleaving",
            "pipelining_with_interleaving",
        )
    ),
    *(
        Patch(
            PROFILE,
            f"{SCHEDULES}:{kind}_step",
            f"--holmes-profile measures the {kind} pass of a micro-batch",
            _during(kind),
        )
        for kind in ("forward", "backward")
    ),
    *(
        Patch(
            PROFILE,
            f"{P2P_MODULE}:{holder}{name}",
            "--holmes-profile measures sends and receives, including waiting",
            _during("receive" if "recv" in name else "send"),
            only=only,
        )
        for holder, only in (("", "<0.14"), ("P2PCommunicator.", ">=0.14"))
        for name in (
            "recv_forward",
            "recv_backward",
            "send_forward",
            "send_backward",
            "send_forward_recv_backward",
            "send_backward_recv_forward",
        )
    ),
)
