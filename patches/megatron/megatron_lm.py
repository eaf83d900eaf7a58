"""Megatron-LM's own training loop under a plan: holmes's flags in its parser, the plan in its arguments and
checkpoints.

    add_megatron_arguments    --help shows a holmes group; what was given stands in args (holmes strips the flags before parsing)
    validate_args             the plan's layers and overlap are set as if they had been on the command line
    check_checkpoint_args     a checkpoint that was saved under another plan is told in one line, its own assertions are one line too
    load_checkpoint           so are tensors of another shape
"""

from __future__ import annotations

from holmes_ext.errors import HolmesError
from holmes_ext.options import CHOICES, HELP, NAMES, flag
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.megatron import core as megatron_core
from holmes_ext.patches.megatron import reduction as megatron_reduction
from holmes_ext.patches.megatron.version import MEGATRON, loaded_version
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.grid import tell
from holmes_ext.runtime.start.refusal import told_once

#: Megatron-LM is run from its checkout: megatron-core, which is also installed alone, has no megatron.training.
MEGATRON_LM = MEGATRON.replace("megatron-core", "megatron-lm")


def _add_flags(wrapped, instance, args, kwargs):
    """The flags with what they were given as defaults, since by now they are gone from sys.argv; and the plan, for
    checkpoints."""
    parser = wrapped(*args, **kwargs)
    current = session.active()
    if current is None:
        return parser
    group = parser.add_argument_group("holmes", "one job over several clusters with different NICs")
    group.add_argument("--holmes", action="store_true", default=True, help="switch holmes on")
    for name in NAMES:
        text = HELP[name].replace("%", "%%")
        group.add_argument(flag(name), default=getattr(current.options, name), choices=CHOICES.get(name), help=text)
    plan = current.plan
    _escape_percent_signs(parser)
    parser.set_defaults(holmes_plan_digest=plan.digest, holmes_nodes=list(plan.nodes), holmes_stage_layers=list(plan.stage_layers))
    return parser


def _escape_percent_signs(parser) -> None:
    """Megatron-LM's main has help texts with a bare "%", on which argparse ends --help with a traceback."""
    for action in parser._actions:
        try:
            (action.help or "") % {**vars(action), "prog": parser.prog}
        except (ValueError, TypeError, KeyError):
            action.help = action.help.replace("%", "%%")


#: Arguments by which a user splits the layers.
_OWN_SPLITS = (
    "pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "num_layers_per_virtual_pipeline_stage",
)  # fmt: skip


def _validate(wrapped, instance, args, kwargs):
    current = session.active()
    if current is not None:
        arguments = args[0] if args else kwargs["args"]
        _set_layout(current, arguments)
        _set_overlap(current, arguments)
    return wrapped(*args, **kwargs)


def _set_layout(current: session.Session, args) -> None:
    """--pipeline-model-parallel-layout from the plan, unless the user splits the layers or megatron does it by another
    model class."""
    if getattr(args, "hybrid_layer_pattern", None) or not args.num_layers:
        return
    own = ", ".join(str(value) if name.endswith("layout") else name for name in _OWN_SPLITS if (value := getattr(args, name, None)))
    pipeline = args.pipeline_model_parallel_size
    virtual = getattr(args, "num_virtual_stages_per_pipeline_rank", None) or max(1, len(current.plan.stage_layers) // pipeline)
    layout = megatron_core.planned_layout(current, pipeline, virtual, args.num_layers, args.mtp_num_layers or 0, own)
    if layout is not None:
        args.pipeline_model_parallel_layout = layout
        args.num_virtual_stages_per_pipeline_rank = None  # the layout says it; the two exclude each other


def _set_overlap(current: session.Session, args) -> None:
    """--overlap-grad-reduce (and the distributed optimizer's gather) where some stage's reduction would be waited for.

    With --align-grad-reduce, the default, only the first stage overlaps: off when a later one has to.
    """
    sizes = current.plan.sizes
    stages = [way.overlap for way in current.stages(sizes, args.distributed_backend)] if sizes else []
    if not any(stages) or args.use_megatron_fsdp or args.use_torch_fsdp2:
        return
    if args.use_distributed_optimizer:
        free = not (args.load or args.save) or getattr(args, "dist_ckpt_optim_fully_reshardable", False)
        megatron_reduction.checkpoints_allow_buckets = free
        if not megatron_reduction.may_bucket_optimizer(current):
            return megatron_reduction.tell_that_buckets_stay(current, "--dist-ckpt-optim-fully-reshardable, or ")
    args.overlap_grad_reduce = True
    if any(stages[1:]):
        args.align_grad_reduce = False
    if args.use_distributed_optimizer and not args.overlap_param_gather_with_optimizer_step:
        args.overlap_param_gather = True


def _compare_plans(wrapped, instance, args, kwargs):
    """After megatron's own check of the model's shape, whose assertions become one line: was the checkpoint saved under
    another plan?"""
    current = session.active()
    try:
        result = wrapped(*args, **kwargs)
    except AssertionError as error:
        if current is None:
            raise
        raise told_once(HolmesError(f"--load: the checkpoint is another model's: {error}")) from None
    saved = args[0] if args else kwargs["checkpoint_args"]
    digest = getattr(saved, "holmes_plan_digest", None)
    if current is not None and digest not in (None, current.plan.digest):
        layers = "+".join(map(str, getattr(saved, "holmes_stage_layers", ()))) or "megatron's own"
        here = "+".join(map(str, current.plan.stage_layers)) or "megatron's own"
        tell(
            current,
            f"the checkpoint was saved under another plan ({digest[:8]}, layers for each stage: {layers}; here"
            f" {current.plan.digest[:8]}, {here}); it loads where the layers match",
        )
    return result


#: What megatron.core.dist_checkpointing.strategies.torch says of tensors that the model has and the checkpoint has not,
#: or not in this shape.
_OTHER_MODEL = ("Global shape mismatch", "from model not in state dict")


def _load(wrapped, instance, args, kwargs):
    """A checkpoint whose tensors are not the model's ends in one line instead of every rank's traceback."""
    try:
        return wrapped(*args, **kwargs)
    except BaseException as error:  # megatron's CheckpointingException or KeyError, or torch's CheckpointException (no Exception) with those of all ranks
        line = next((line.strip() for line in str(error).splitlines() if any(words in line for words in _OTHER_MODEL)), None)
        if session.active() is None or line is None:
            raise
        raise told_once(HolmesError(f"--load: the checkpoint is another model's: {line[:300]}"), "--load") from None


PATCHES = (
    Patch(
        feature="megatron-lm",
        target="megatron.training.arguments:add_megatron_arguments",
        versions=MEGATRON_LM,
        version_of=loaded_version,
        parameters=("parser",),
        wrap=_add_flags,
        reason="main's pretrain takes no extra_args_provider, and args are what checkpoints record",
    ),
    Patch(
        feature="megatron-lm",
        target="megatron.training.arguments:validate_args",
        versions=MEGATRON_LM,
        version_of=loaded_version,
        parameters=("args",),
        wrap=_validate,
        reason="layers and overlap are set as arguments, before megatron derives others from them",
    ),
    Patch(
        feature="megatron-lm-checkpoints",
        target="megatron.training.checkpointing:check_checkpoint_args",
        versions=MEGATRON_LM,
        version_of=loaded_version,
        parameters=("checkpoint_args",),
        wrap=_compare_plans,
        reason="here the arguments that a checkpoint was saved with are known",
    ),
    Patch(
        feature="megatron-lm-checkpoints",
        target="megatron.training.checkpointing:load_checkpoint",
        versions=MEGATRON_LM,
        version_of=loaded_version,
        parameters=("load_arg",),
        wrap=_load,
        reason="another model's tensors end in one line, not in a traceback of every rank",
    ),
)
