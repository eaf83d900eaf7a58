"""Sets the plan's layers and overlap in Megatron-LM's arguments, and checks the plan of its checkpoints.

A plan has holmes's decisions for a job, such as the number of layers of each pipeline stage. Three
functions of Megatron-LM are wrapped:

    validate_args            Before, the plan's values are set in the parsed arguments, as if the user had
                             given them on the command line.
    check_checkpoint_args    After, a message says if the checkpoint was saved under another plan.
    load_checkpoint          If the checkpoint is another model's, the job ends with one line instead of a
                             traceback of each rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name, with_session
from holmes_ext.patches.megatron import core as megatron_core
from holmes_ext.patches.megatron.features import LM, LM_CHECKPOINTS
from holmes_ext.patches.megatron.reduce import reduction as megatron_reduction
from holmes_ext.runtime.deadline import told_once
from holmes_ext.runtime.session import Session, tell

#: Arguments for a user to split the layers over the pipeline stages.
_SPLIT_ARGUMENTS = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "num_layers_per_virtual_pipeline_stage",
)


@with_session
@by_name
def _validate(current: Session, call: Call, instance: Any, args: Any) -> Any:
    """Set holmes's planned values in Megatron-LM's parsed arguments, before they are validated.

    The plan has the number of layers of each pipeline stage, and whether gradient reductions overlap.
    This wrapper runs in place of validate_args; call() runs the original. That function checks the arguments
    and derives others from them. The plan's values thus have the same effect as on the command line.
    """
    _set_layout(current, args)
    _set_overlap(current, args)
    return call()


def _set_layout(current: Session, args: Any) -> None:
    """Set --pipeline-model-parallel-layout to the layers that holmes planned for each pipeline stage.

    If the user has split the layers, the user's split stays.
    Hybrid models stay as they are: a pattern of their own arranges their layers.
    """
    is_hybrid_model = bool(getattr(args, "hybrid_layer_pattern", None))
    if is_hybrid_model or not args.num_layers:
        return
    pipeline = args.pipeline_model_parallel_size

    # Chunks of layers on each stage; more than 1 with the interleaved schedule.
    chunks = getattr(args, "num_virtual_stages_per_pipeline_rank", None)
    if not chunks:  # not given: as many as the plan has
        chunks = max(1, len(current.plan.stage_layers) // pipeline)
    layout = megatron_core.planned_layout(
        current,
        pipeline,
        virtual=chunks,
        layers=args.num_layers,
        mtp_layers=args.mtp_num_layers or 0,
        own_split=_split_of_user(args),
    )
    if layout is not None:  # None: the plan does not split the layers, or the user does
        args.pipeline_model_parallel_layout = layout
        # Megatron-LM derives this number from the layout, and refuses both arguments together.
        args.num_virtual_stages_per_pipeline_rank = None


def _split_of_user(args: Any) -> str:
    """Return in words how the user splits the layers over the stages; "" if the user does not.

    A message to the user quotes the text. planned_layout() also compares it with the planned
    layout. Therefore the text has the value of --pipeline-model-parallel-layout, such as "Ett|tL".
    Any other argument that splits the layers cannot equal a layout, and its name is enough, such as
    "decoder_first_pipeline_num_layers". Several are joined by commas.
    """
    parts = []
    for name in _SPLIT_ARGUMENTS:
        value = getattr(args, name, None)
        if value:  # the value of the layout, the name of any other argument
            parts.append(str(value) if name.endswith("layout") else name)
    return ", ".join(parts)


def _set_overlap(current: Session, args: Any) -> None:
    """Set --overlap-grad-reduce and --overlap-param-gather if holmes planned an overlap for a pipeline stage.

    Gradient reductions then overlap with the backward pass, in buckets. The format of the
    distributed optimizer's checkpoints depends on its buckets, unless the checkpoints are fully
    reshardable. If the job has checkpoints that depend on them, nothing is set, and a message tells
    the user how to change that. The option --holmes-overlap on sets the flags all the same.

    Args:
        args: Megatron-LM's parsed arguments. They are changed in place.
    """
    sizes = current.plan.sizes
    # FSDP reduces gradients without these buckets.
    uses_fsdp = args.use_megatron_fsdp or args.use_torch_fsdp2
    if not sizes or uses_fsdp:
        return
    planned_reductions = current.stages(sizes, args.distributed_backend)
    overlaps = [reduction.overlap for reduction in planned_reductions]  # of each pipeline stage
    if not any(overlaps):
        return
    if args.use_distributed_optimizer:
        has_checkpoints = bool(args.load or args.save)
        is_fully_reshardable = getattr(args, "dist_ckpt_optim_fully_reshardable", False)
        # may_change_optimizer_buckets() returns True if this global of reduction.py is True, or
        # with the option --holmes-overlap on. It is called here, and later again, when
        # DistributedDataParallel is constructed.
        megatron_reduction.checkpoints_allow_buckets = not has_checkpoints or is_fully_reshardable
        if not megatron_reduction.may_change_optimizer_buckets(current):
            megatron_reduction.warn_that_buckets_stay(
                current, other_option="--dist-ckpt-optim-fully-reshardable"
            )
            return
    args.overlap_grad_reduce = True
    later_stage_overlaps = any(overlaps[1:])
    if later_stage_overlaps:
        args.align_grad_reduce = False  # its default, True, lets only the first stage overlap
    if args.use_distributed_optimizer and not args.overlap_param_gather_with_optimizer_step:
        args.overlap_param_gather = True


@with_session
@by_name
def _compare_plans(current: Session, call: Call, instance: Any, checkpoint_args: Any) -> Any:
    """Check a checkpoint's arguments, and print a line if it was saved under another plan of holmes.

    This wrapper runs in place of Megatron-LM's check_checkpoint_args; call() runs the original. It raises an
    AssertionError if the checkpoint is another model's. `checkpoint_args` are the arguments of the job that
    saved the checkpoint. Among them are the digest and the layers of its plan.

    Raises:
        HolmesError: megatron's check failed; the error names the argument that differs, in one line.
    """
    try:
        result = call()
    except AssertionError as error:
        # All ranks get here. told_once() prints the error on one rank, and returns one that prints nothing.
        raise told_once(
            HolmesError(f"--load: the checkpoint is another model's: {error}")
        ) from None
    saved_digest = getattr(checkpoint_args, "holmes_plan_digest", None)
    if saved_digest is None:  # saved without holmes
        return result
    if saved_digest == current.plan.digest:
        return result
    saved_layers = _describe_layers(getattr(checkpoint_args, "holmes_stage_layers", ()))
    current_layers = _describe_layers(current.plan.stage_layers)
    plans = (
        f"{saved_digest[:8]}, layers for each stage: {saved_layers}; "
        f"here {current.plan.digest[:8]}, {current_layers}"
    )
    tell(
        current,
        f"the checkpoint was saved under another plan ({plans}); it loads where the layers match",
    )
    return result


def _describe_layers(stage_layers: Iterable[int]) -> str:
    """Return numbers of layers in the form "3+1"; "megatron's own" if there are none."""
    return "+".join(map(str, stage_layers)) or "megatron's own"


#: Parts of torch's error messages about tensors that a checkpoint lacks, or has with another shape.
_OTHER_MODEL = ("Global shape mismatch", "from model not in state dict")


@with_session
@by_name
def _load(current: Session, call: Call, instance: Any) -> Any:
    """Load a checkpoint; if it is another model's, end the job with one line instead of many tracebacks.

    This wrapper runs in place of Megatron-LM's load_checkpoint; call() runs the original.

    Raises:
        HolmesError: tensors of the checkpoint are missing or have other shapes.
    """
    try:
        return call()
    except BaseException as error:
        # torch's CheckpointException has the errors of all ranks. It is a BaseException but no Exception.
        lines = []
        for line in str(error).splitlines():
            if any(words in line for words in _OTHER_MODEL):
                lines.append(line.strip())
        if not lines:  # another error
            raise
        refusal = HolmesError(f"--load: the checkpoint is another model's: {lines[0][:300]}")
        # All ranks get here. told_once() prints the error on one rank, and returns one that prints nothing.
        # It recognizes the same error of other ranks by the message, or by a given topic. Here the topic is
        # "--load", because the messages of ranks can name different tensors.
        raise told_once(refusal, "--load") from None


PATCHES = (
    Patch(
        LM,
        "megatron.training.arguments:validate_args",
        "the plan's layers and overlap must be set before Megatron derives other arguments from them",
        _validate,
    ),
    Patch(
        LM_CHECKPOINTS,
        "megatron.training.checkpointing:check_checkpoint_args",
        "the arguments of the job that saved the checkpoint are known here",
        _compare_plans,
    ),
    Patch(
        LM_CHECKPOINTS,
        "megatron.training.checkpointing:load_checkpoint",
        "if the checkpoint is another model's, one line replaces a traceback of every rank",
        _load,
        parameters=("load_arg",),
    ),
)
