"""Megatron-LM's own training loop under a plan: its layers and overlap in the arguments, as if they had been
on the command line, and in checkpoints: what does not fit is one line."""

from __future__ import annotations

from collections.abc import Iterable

from holmes_ext.errors import HolmesError
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name, with_session
from holmes_ext.patches.megatron import core as megatron_core
from holmes_ext.patches.megatron.features import LM, LM_CHECKPOINTS
from holmes_ext.patches.megatron.reduce import reduction as megatron_reduction
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.grid import tell
from holmes_ext.runtime.start.refusal import told_once

#: Arguments by which a user splits the layers.
_OWN_SPLITS = (
    "pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "num_layers_per_virtual_pipeline_stage",
)  # fmt: skip


@with_session
@by_name
def _validate(current, call, instance, args):
    """Set the plan's layers and overlap in Megatron-LM's arguments, before they are validated.

    validate_args checks the arguments and derives others from them. The plan's values thus have the same
    effect as on the command line.
    """
    _set_layout(current, args)
    _set_overlap(current, args)
    return call()


def _set_layout(current: session.Session, args) -> None:
    """--pipeline-model-parallel-layout from the plan, unless user or model class split the layers."""
    if getattr(args, "hybrid_layer_pattern", None) or not args.num_layers:
        return
    splits = {name: value for name in _OWN_SPLITS if (value := getattr(args, name, None))}
    own_split = ", ".join(str(value) if name.endswith("layout") else name for name, value in splits.items())
    pipeline = args.pipeline_model_parallel_size
    virtual = getattr(args, "num_virtual_stages_per_pipeline_rank", None)
    virtual = virtual or max(1, len(current.plan.stage_layers) // pipeline)
    layout = megatron_core.planned_layout(current, pipeline, virtual, args.num_layers,
                                          args.mtp_num_layers or 0, own_split)
    if layout is not None:
        args.pipeline_model_parallel_layout = layout
        args.num_virtual_stages_per_pipeline_rank = None  # the layout says it; the two exclude each other


def _set_overlap(current: session.Session, args) -> None:
    """--overlap-grad-reduce (and the gather) where some stage's reduction would be waited for. With
    --align-grad-reduce, the default, only the first stage overlaps: off when a later one has to."""
    sizes = current.plan.sizes
    stages = [stage.overlap for stage in current.stages(sizes, args.distributed_backend)] if sizes else []
    if not any(stages) or args.use_megatron_fsdp or args.use_torch_fsdp2:
        return
    if args.use_distributed_optimizer:
        free = not (args.load or args.save) or getattr(args, "dist_ckpt_optim_fully_reshardable", False)
        megatron_reduction.checkpoints_allow_buckets = free
        if not megatron_reduction.may_change_optimizer_buckets(current):
            megatron_reduction.warn_that_buckets_stay(current, "--dist-ckpt-optim-fully-reshardable, or ")
            return
    args.overlap_grad_reduce = True
    if any(stages[1:]):
        args.align_grad_reduce = False
    if args.use_distributed_optimizer and not args.overlap_param_gather_with_optimizer_step:
        args.overlap_param_gather = True


@with_session
@by_name
def _compare_plans(current, call, instance, checkpoint_args):
    """Run megatron's check of the model, then print a line if the checkpoint was saved under another plan.

    Raises:
        HolmesError: megatron's check failed; the error names the argument that differs, in one line.
    """
    try:
        result = call()
    except AssertionError as error:
        raise told_once(HolmesError(f"--load: the checkpoint is another model's: {error}")) from None
    digest = getattr(checkpoint_args, "holmes_plan_digest", None)
    if digest not in (None, current.plan.digest):
        saved_layers = _describe_layers(getattr(checkpoint_args, "holmes_stage_layers", ()))
        own_layers = _describe_layers(current.plan.stage_layers)
        plans = (f"{digest[:8]}, layers for each stage: {saved_layers}; "
                 f"here {current.plan.digest[:8]}, {own_layers}")
        tell(current,
             f"the checkpoint was saved under another plan ({plans}); it loads where the layers match")
    return result


def _describe_layers(stage_layers: Iterable[int]) -> str:
    return "+".join(map(str, stage_layers)) or "megatron's own"


#: What dist_checkpointing/strategies/torch.py says of tensors that the checkpoint has not, or not so.
_OTHER_MODEL = ("Global shape mismatch", "from model not in state dict")


@with_session
@by_name
def _load(current, call, instance):
    """Load a checkpoint; if it is another model's, end the job with one line instead of many tracebacks.

    Raises:
        HolmesError: tensors of the checkpoint are missing or have other shapes.
    """
    try:
        return call()
    except BaseException as error:
        # Either megatron's error or torch's CheckpointException, which has the errors of all ranks and is no
        # Exception.
        lines = [line.strip() for line in str(error).splitlines()
                 if any(words in line for words in _OTHER_MODEL)]
        if not lines:
            raise
        raise told_once(HolmesError(f"--load: the checkpoint is another model's: {lines[0][:300]}"),
                        "--load") from None


PATCHES = (
    Patch(LM, "megatron.training.arguments:validate_args",
          "layers and overlap are set as arguments, before megatron derives others from them", _validate),
    Patch(LM_CHECKPOINTS, "megatron.training.checkpointing:check_checkpoint_args",
          "here the arguments that a checkpoint was saved with are known", _compare_plans),
    Patch(LM_CHECKPOINTS, "megatron.training.checkpointing:load_checkpoint",
          "another model's tensors end in one line, not in a traceback of every rank", _load,
          parameters=("load_arg",)),
)  # fmt: skip
