"""Makes DistributedDataParallel (DDP) average gradients across clusters by hierarchical all-reduce.

Terms:

    hierarchical all-reduce   sums inside each cluster first, then between clusters
    comm hook                 a function that DDP calls for each full bucket of gradients, instead of its own
                              all-reduce; torch has a public method to register it, and accepts only one

holmes registers a comm hook when a DDP is constructed, if the plan of the job prefers a hierarchical
all-reduce. DDP still divides the gradients among buckets and decides when a bucket is reduced. So no_sync(),
unused parameters, static_graph and gradient_as_bucket_view work as in torch without holmes.

If the program registers a hook too, holmes's hook stays registered and acts as follows:

    the program's hook                      a bucket is averaged by
    none, or allreduce_hook                 a hierarchical all-reduce
    {fp16,bf16}_compress_hook (_wrapper)    a hierarchical all-reduce, in float16 or bfloat16
    any other                               the program's hook; rank 0 prints a message

Some options exclude a comm hook (_obstacle_to_hook()). DDP then reduces as in torch without holmes, and rank
0 prints a message.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any, NamedTuple

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name, with_session
from holmes_ext.patches.torch.buckets import BucketReducer, ProgramHook
from holmes_ext.patches.torch.features import DDP_HOOK
from holmes_ext.runtime import session
from holmes_ext.runtime.backend import backend_of, group_ranks
from holmes_ext.runtime.session import Session, tell

_DDP = "torch.nn.parallel.distributed:DistributedDataParallel"
#: Unit of DistributedDataParallel's argument bucket_cap_mb.
BYTES_PER_MB = 2**20
#: DistributedDataParallel object -> state of the comm hook that holmes registered with it.
_reducers: weakref.WeakKeyDictionary[Any, BucketReducer] = weakref.WeakKeyDictionary()


class HookEffect(NamedTuple):
    """Effect of a comm hook of the training program on a bucket of gradients."""

    #: Whether the hook only averages, so that a hierarchical all-reduce can take its place.
    is_average: bool
    #: The dtype of the gradients as the hook sends them; None: the gradients' own dtype.
    wire_dtype: Any = None


def defer_waits_for_reductions(module: Any) -> BucketReducer | None:
    """Postpone a pipeline stage's waits for gradient reductions to the end of a training step.

    In torch, DistributedDataParallel (DDP) waits for its reductions at the end of a backward pass.
    From now on, the backward passes of the stage only start the reductions. holmes's comm hook does
    that, a function that DDP calls for each bucket of gradients. The hook is registered if there is
    none yet.

    Args:
        module: The stage's module, in DDP or not.

    Returns:
        The reducer of the gradients; its finish() waits for the reductions. None if DDP waits
        itself, or does not reduce:

        - The module is not a DDP, or its group has one rank.
        - A comm hook of the program reduces, or an option of DDP excludes holmes's hook.
        - DDP looks for unused parameters (find_unused_parameters, static_graph): it must write gradients
          itself.
    """
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(module, DistributedDataParallel):
        return None
    # _comm_hooks: torch's list of the module's hooks.
    has_hook = module in _reducers or module._comm_hooks
    if not has_hook and module.process_group.size() > 1:
        # The plan did not need a hook when the module was constructed, but a postponed wait does,
        # so the hook is registered now. An option of DDP may exclude a hook. _obstacle_to_hook()
        # looks for such options in the constructor's arguments. These are the ones that it reads,
        # as the module has stored them.
        arguments = {
            "module": module.module,
            "process_group": module.process_group,
            "mixed_precision": module.mixed_precision,
            "delay_all_reduce_named_params": module._delay_all_reduce_params,
        }
        if not _obstacle_to_hook(arguments):
            _register_holmes_hook(module)
    reducer = _reducers.get(module)  # the state of holmes's hook
    if reducer is None or reducer.program_hook:
        return None  # DDP or the program's hook reduces
    if module.find_unused_parameters or module.static_graph:
        return None  # DDP must write gradients itself

    # With a list, the reducer only starts the sum of a bucket, and appends the bucket to the list.
    reducer.unfinished_buckets = []
    return reducer


def hierarchical_hook(state, bucket):  # type: ignore[no-untyped-def]  # the comment below says why
    """Average a bucket of gradients: the comm hook that holmes registers with DDP.

    If the program has registered a comm hook that does more than average, this function calls the program's
    hook instead.

    Args:
        state: The BucketReducer of the DistributedDataParallel (DDP).
        bucket: A torch.distributed.GradBucket.

    Returns:
        A future of the bucket's averaged tensor.
    """
    # No annotations: DDP compares the annotations of a hook with types. Here they would be strings, because
    # of `from __future__ import annotations`.
    if state.program_hook is not None:
        return state.program_hook.hook(state.program_hook.state, bucket)
    return state.reduce(bucket)


@with_session
@by_name
def _construct(current: Session, call: Call, instance: Any) -> None:
    """Construct a DistributedDataParallel (DDP), and register holmes's comm hook if it is needed.

    Runs instead of DistributedDataParallel.__init__; `call()` runs the original.

    A comm hook is called for each bucket of gradients, instead of DDP's all-reduce. holmes needs it:

    - if the plan of the job reduces hierarchically (inside each cluster first, then between clusters)
    - for telemetry: it sees only operations that Python starts

    The hook must be there before the first forward pass: under join(), a rank without inputs never runs one,
    but takes part in the sums.
    """
    arguments = call.given()  # of DDP's constructor, by name
    planned = _planned_reduction(arguments)
    obstacle = _obstacle_to_hook(arguments)  # an option that excludes a comm hook; else ""

    # planned.hierarchical sums by hierarchical all-reduce. It is None if the plan chooses another reduction.
    is_hierarchical = planned is not None and planned.hierarchical is not None
    needs_hook = is_hierarchical and not obstacle
    has_bucket_size = "bucket_cap_mb" in arguments or "bucket_cap_mb_list" in arguments

    if needs_hook and not has_bucket_size:
        bucket_mb = planned.spec.chunk_bytes / BYTES_PER_MB
        call(bucket_cap_mb=bucket_mb)
    else:
        call()

    if needs_hook:
        _register_holmes_hook(instance, planned)
        # close() ends the threads of the hierarchical all-reduce when the DDP is deleted. At the
        # interpreter's exit this is not needed: the threads are daemons.
        end_threads = weakref.finalize(instance, planned.close)
        end_threads.atexit = False
    elif is_hierarchical:
        tell(  # prints on rank 0
            current,
            "DistributedDataParallel reduces as torch does, without a hierarchical all-reduce, because of "
            f"{obstacle}",
            once=True,
        )
    elif current.options.telemetry and not obstacle:
        _register_holmes_hook(instance)  # without a plan: the hook calls torch's all-reduce

    if planned is not None:
        # Note for the job's report whether the gradients are reduced as planned.
        session.note_reduction(
            planned.ranks,
            planned.spec,
            planned.size,
            hierarchical=is_hierarchical and not obstacle,
            overlap=True,  # DDP always reduces during the backward pass
            reported=bool(obstacle),  # whether rank 0 has printed why the job differs from the plan
        )
        if not needs_hook:
            planned.close()  # the reduction will not be used


def _register_holmes_hook(ddp: Any, planned: Any = None) -> None:
    """Register holmes's comm hook. It averages each bucket of gradients.

    Args:
        ddp: The DistributedDataParallel.
        planned: The reduction that the plan chooses (a PlannedReduction). With None the hook calls torch's
            all-reduce, so that telemetry sees the operation or a pipeline can wait for it later.
    """
    from holmes_ext.runtime.reduce.reduction import FlatReduction

    if planned is not None:
        reduction = planned.reduction
    else:
        reduction = FlatReduction(ddp.process_group)  # torch's own
    reducer = BucketReducer(ddp, reduction, planned)
    ddp.register_comm_hook(reducer, hierarchical_hook)
    _reducers[ddp] = reducer


def _planned_reduction(arguments: dict[str, Any]) -> Any:
    """Return the gradient reduction that holmes's plan chooses for a module.

    Args:
        arguments: Arguments of DistributedDataParallel's constructor, by name.

    Returns:
        A PlannedReduction. None if no parameter needs a gradient or one is uninitialized: the constructor
        refuses such a module.
    """
    from torch.nn.parameter import UninitializedParameter

    from holmes_ext.runtime.reduce.planned import PlannedReduction

    trained = _trained_parameters(arguments)
    has_uninitialized = any(isinstance(parameter, UninitializedParameter) for parameter in trained)
    if not trained or has_uninitialized:
        return None
    return PlannedReduction(
        _group_of_arguments(arguments),
        size=sum(parameter.nbytes for parameter in trained),
        device_type=trained[0].device.type,
    )


def _trained_parameters(arguments: dict[str, Any]) -> list[Any]:
    """Return the parameters that need a gradient.

    Args:
        arguments: Arguments of DistributedDataParallel's constructor, by name.
    """
    module = arguments["module"]
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _group_of_arguments(arguments: dict[str, Any]) -> Any:
    """Return the process group that DistributedDataParallel averages gradients over.

    Args:
        arguments: Arguments of DistributedDataParallel's constructor, by name.
    """
    import torch.distributed as dist

    process_group = arguments.get("process_group")
    if process_group:
        return process_group
    mesh = arguments.get("device_mesh")
    if mesh is not None:
        return mesh.get_group(0)  # of the mesh's first dimension: DDP accepts a 1-D mesh only
    return dist.group.WORLD


def _obstacle_to_hook(arguments: dict[str, Any]) -> str:
    """Return the option that excludes a comm hook in Python, in words for the user; "" if none does.

    A comm hook is a function that DistributedDataParallel calls for each bucket of gradients, in
    place of its own all-reduce.

    Args:
        arguments: Arguments of DistributedDataParallel's constructor, by name.
    """
    import torch._dynamo

    for name in ("mixed_precision", "delay_all_reduce_named_params"):
        if arguments.get(name):
            return name  # DistributedDataParallel registers a hook of its own for this option

    # With a python_reducer, compiled autograd reduces gradients without buckets.
    optimize_ddp = str(torch._dynamo.config.optimize_ddp)
    if optimize_ddp.startswith("python_reducer"):
        return "torch._dynamo.config.optimize_ddp = 'python_reducer'"
    trained = _trained_parameters(arguments)
    device = trained[0].device.type if trained else "cpu"

    # On a GPU, the hook must not block the host: a CUDA stream waits for the sum (BucketReducer). NCCL's
    # Work.wait() lets a stream wait, but gloo's blocks the host. A process group may use one backend for
    # the CPU and another for GPUs.
    if device != "cpu" and backend_of(_group_of_arguments(arguments), device) == "gloo":
        return f"gloo with tensors on {device}"
    return ""


@by_name
def _register_program_hook(call: Call, instance: Any, state: Any, hook: Any) -> None:
    """Accept the program's comm hook, although DDP already has holmes's and accepts only one.

    Runs instead of DistributedDataParallel.register_comm_hook; `call()` runs the original.

    holmes's hook stays registered. If the program's hook is one of torch's that only average, holmes's hook
    sends gradients in the same dtype. Any other hook of the program is called by holmes's hook for each
    bucket.
    """
    import torch.distributed as dist

    reducer = _reducers.get(instance)
    if reducer is None or reducer.has_registered_hook:
        call()  # there is no hook of holmes, or torch raises its error for a second hook
        return

    # Raises an error if a later torch passes an argument that this wrapper does not read.
    call.refuse_unread_arguments()
    # torch's method does the same, and then registers the hook.
    instance._check_comm_hook(hook)
    instance.logger._set_comm_hook_name(hook.__qualname__)
    reducer.has_registered_hook = True  # so torch refuses the program's next hook (see above)
    effect = _effect_of(hook)

    # The state of torch's averaging hooks is their process group; None stands for the default group.
    hook_group = state or dist.group.WORLD
    # Over another group than the DDP's, the hook's average has another result than holmes's.
    if effect.is_average and hook_group is instance.process_group:
        reducer.wire_dtype = effect.wire_dtype  # holmes's hook sends gradients in this dtype
        return

    reducer.program_hook = ProgramHook(state, hook)  # from now on hierarchical_hook() calls it
    current = session.require()
    tell(  # prints on rank 0
        current,
        f"the comm hook {hook.__qualname__} reduces DistributedDataParallel's buckets, in place of holmes's "
        "hierarchical all-reduce",
        once=True,
    )

    # The constructor has noted for the job's report that DDP reduces hierarchically. Correct the note.
    ranks = group_ranks(instance.process_group)
    noted = current.reductions.get(tuple(ranks))
    if noted:
        session.note_reduction(
            ranks,
            noted.planned,
            noted.bytes,
            hierarchical=False,
            overlap=True,  # DDP calls the hook during the backward pass
            reported=True,  # rank 0 has just printed why the job differs from the plan
        )


@by_name
def _register_builtin_hook(call: Call, instance: Any, comm_hook_type: Any) -> None:
    """Register the Python counterpart of a built-in comm hook of torch, written in C++.

    Runs instead of DistributedDataParallel._register_builtin_comm_hook; `call()` runs the original.

    holmes can combine only Python hooks with its own hook. The two built-in hooks, ALLREDUCE and
    FP16_COMPRESS, have counterparts in Python: allreduce_hook and fp16_compress_hook.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    reducer = _reducers.get(instance)
    if reducer is None or reducer.has_registered_hook:
        call()  # there is no hook of holmes, or torch raises its error for a second hook
        return
    # Raises an error if a later torch passes an argument that this wrapper does not read.
    call.refuse_unread_arguments()
    python_name = f"{comm_hook_type.name.lower()}_hook"  # "fp16_compress_hook" for FP16_COMPRESS
    hook = getattr(default_hooks, python_name)
    instance.register_comm_hook(instance.process_group, hook)  # runs _register_program_hook()


def _effect_of(hook: Any) -> HookEffect:
    """Return the effect of a comm hook on a bucket of gradients.

    Only torch's hooks that average are recognized. fp16_compress_wrapper(hook) returns a new function each
    time, so it is recognized by its qualified name. It averages if `hook`, a variable of its closure, is
    allreduce_hook.
    """
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if hook is default_hooks.allreduce_hook:
        return HookEffect(is_average=True)
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        if hook is getattr(default_hooks, f"{name}_compress_hook"):
            return HookEffect(is_average=True, wire_dtype=dtype)
        # The wrapper's hook is "fp16_compress_wrapper.<locals>.fp16_compress_wrapper_hook" or similar.
        qualified_name = getattr(hook, "__qualname__", "")
        if qualified_name.startswith(f"{name}_compress_wrapper."):
            wrapped_hook = inspect.getclosurevars(hook).nonlocals["hook"]
            only_averages = wrapped_hook is default_hooks.allreduce_hook
            return HookEffect(is_average=only_averages, wire_dtype=dtype)
    return HookEffect(is_average=False)


@by_name
def _keep_join_count(call: Call, instance: Any, joinable: Any) -> Any:
    """Keep the Work of torch's join() that counts the ranks with inputs left.

    Runs instead of Join.notify_join_context; `call()` runs the original.

    notify_join_context counts these ranks by an all-reduce, and returns its Work. Outside join() it returns
    None. Under join(divide_by_initial_world_size=False), gradients are divided by the number.
    """
    work = call()
    reducer = _reducers.get(joinable)
    if reducer:
        reducer.ranks_with_inputs = work  # BucketReducer waits for it before it divides
    return work


PATCHES = (
    Patch(
        DDP_HOOK,
        f"{_DDP}.__init__",
        "holmes's comm hook must be registered before the first forward pass",
        _construct,
        parameters=("module", "process_group", "bucket_cap_mb"),
    ),
    Patch(
        DDP_HOOK,
        f"{_DDP}.register_comm_hook",
        "DistributedDataParallel accepts one comm hook, and holmes has registered its own",
        _register_program_hook,
    ),
    Patch(
        DDP_HOOK,
        f"{_DDP}._register_builtin_comm_hook",
        "the same for comm hooks written in C++",
        _register_builtin_hook,
    ),
    Patch(
        DDP_HOOK,
        "torch.distributed.algorithms.join:Join.notify_join_context",
        "join(divide_by_initial_world_size=False) divides by the count that this function's Work returns",
        _keep_join_count,
    ),
)
