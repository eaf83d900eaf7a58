"""Reduces DistributedDataParallel's buckets in two levels, if the plan does so for a group over clusters.

"Two levels" is a hierarchical all-reduce: inside each cluster first, then between clusters. It is put into
DDP as a comm hook, which is public in torch and replaces only the sum of a bucket. DDP's reducer (C++) still
decides which gradients form a bucket, when it is reduced and into which .grad. So no_sync(), unused
parameters, static_graph and gradient_as_bucket_view work as in stock (torch without holmes).

The hook is registered at construction: a rank without inputs under join() never runs a forward pass, but must
sum its zeros like all other ranks. A reducer takes a single hook. So if the program registers one, holmes's
hook stays and changes what it does:

    the program registers                   a bucket is reduced by
    nothing, allreduce_hook                 two levels
    {fp16,bf16}_compress_hook (_wrapper)    two levels, in float16 or bfloat16
    any other hook                          the program's hook; a message says so

With an option that excludes a hook (_reason_for_stock()) the reduction stays stock's, and a message says so.
Inside one cluster, and where a single ring is faster, nothing changes.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any, NamedTuple

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name, with_session
from holmes_ext.patches.torch.buckets import BucketReducer
from holmes_ext.patches.torch.features import DDP_HOOK
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.backend import backend_of, group_ranks
from holmes_ext.runtime.groups.grid import tell

_DDP = "torch.nn.parallel.distributed:DistributedDataParallel"
#: DistributedDataParallel object -> state of the comm hook that holmes registered with it.
_reducers: weakref.WeakKeyDictionary[Any, BucketReducer] = weakref.WeakKeyDictionary()


class HookEffect(NamedTuple):
    """What a comm hook of the program does with a bucket."""

    is_average: bool  # whether it only averages, so that the two levels can take its place
    wire_dtype: Any = None  # the dtype in which it sends the gradients; None: their own


def postpone_reductions(module: Any) -> BucketReducer | None:
    """Let the backward passes of a pipeline stage start reductions without waiting for them.

    Returns:
        The reducer whose finish() waits for the reductions. None if DDP waits itself: the module is not in
        DistributedDataParallel, the program's own hook reduces, or DDP looks for unused parameters, whose
        gradients only DDP knows.
    """
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(module, DistributedDataParallel):
        return None
    if module not in _reducers and not module._comm_hooks and module.process_group.size() > 1:
        arguments = {
            "module": module.module,
            "process_group": module.process_group,
            "mixed_precision": module.mixed_precision,
            "delay_all_reduce_named_params": module._delay_all_reduce_params,
        }
        if not _reason_for_stock(arguments):
            _register_holmes_hook(module)
    reducer = _reducers.get(module)
    if reducer is None or reducer.program_hook or module.find_unused_parameters or module.static_graph:
        return None
    reducer.postponed = []
    return reducer


def two_level_hook(state, bucket):
    """Reduce a bucket by the program's comm hook, or else by holmes.

    This is holmes's comm hook. It has no annotations: DDP compares a hook's annotations with types, and in
    this module (from __future__ import annotations) they would be strings.
    """
    if state.program_hook is not None:
        program_state, hook = state.program_hook
        return hook(program_state, bucket)
    return state.reduce(bucket)


@with_session
@by_name
def _construct(current, call, instance):
    """Construct a DistributedDataParallel, and register the comm hook if the plan needs one.

    The plan needs the hook to reduce in two levels, and on the CPU for --holmes-apart, which may sum
    gradients inside each cluster only. With two levels a bucket has the plan's size, unless the program gives
    a size itself.
    """
    arguments = call.given()
    planned_sum = _planned_sum(arguments)
    reason_for_stock = _reason_for_stock(arguments)
    is_two_level = planned_sum is not None and planned_sum.two_level is not None
    may_train_apart = (
        planned_sum is not None
        and planned_sum.device_type == "cpu"
        and planned_sum.apart.settings is not None
    )
    needs_hook = (is_two_level or may_train_apart) and not reason_for_stock
    has_bucket_size = "bucket_cap_mb" in arguments or "bucket_cap_mb_list" in arguments

    if needs_hook and is_two_level and not has_bucket_size:
        call(bucket_cap_mb=planned_sum.reduction.chunk_bytes / 2**20)
    else:
        call()

    if needs_hook:
        _register_holmes_hook(instance, planned_sum)
        end_threads = weakref.finalize(instance, planned_sum.close)
        end_threads.atexit = False  # the threads are daemons, which end with the interpreter
    elif is_two_level:
        tell(
            current,
            f"DistributedDataParallel reduces as torch does, on one level, because of {reason_for_stock}",
            once=True,
        )
    elif current.options.telemetry and not reason_for_stock:
        _register_holmes_hook(instance)  # torch's all-reduce, started from Python, where telemetry sees it

    if planned_sum is None:
        return  # without trained parameters nothing is summed
    session.note_reduction(
        planned_sum.ranks,
        planned_sum.reduction,
        planned_sum.size,
        two_levels=is_two_level and not reason_for_stock,
        overlap=True,
        reported=bool(reason_for_stock),  # the message above has told the user of the difference
    )
    if not needs_hook:
        planned_sum.close()


def _register_holmes_hook(ddp: Any, planned_sum: Any = None) -> None:
    """Register holmes's comm hook with a DistributedDataParallel.

    Args:
        planned_sum: The plan's choice for the gradients (a GroupSum). None: torch's all-reduce, which the
            hook starts so that telemetry sees it, or so that a pipeline can postpone waiting for it.
    """
    from holmes_ext.runtime.reduce.straddling import flat_all_reduce

    all_reduce = planned_sum.all_reduce if planned_sum is not None else flat_all_reduce(ddp.process_group)
    reducer = BucketReducer(ddp, all_reduce, planned_sum)
    ddp.register_comm_hook(reducer, two_level_hook)
    _reducers[ddp] = reducer


def _planned_sum(arguments: dict[str, Any]) -> Any:
    """Return how the plan sums the gradients of a module (a GroupSum); None if DDP refuses the module.

    Args:
        arguments: Those of DistributedDataParallel's constructor, by name.
    """
    from torch.nn.parameter import UninitializedParameter

    from holmes_ext.runtime.reduce.straddling import GroupSum

    trained = [parameter for parameter in arguments["module"].parameters() if parameter.requires_grad]
    if not trained or any(isinstance(parameter, UninitializedParameter) for parameter in trained):
        return None
    return GroupSum(
        _group(arguments),
        size=sum(parameter.nbytes for parameter in trained),
        device_type=trained[0].device.type,
        compress=None,
        all_reduce=None,
        bucket_bytes=None,
        weights=trained,
    )


def _group(arguments: dict[str, Any]) -> Any:
    """Return the process group over which DistributedDataParallel averages, given its arguments."""
    import torch.distributed as dist

    mesh = arguments.get("device_mesh")
    return arguments.get("process_group") or (mesh.get_group(0) if mesh is not None else dist.group.WORLD)


def _reason_for_stock(arguments: dict[str, Any]) -> str:
    """Return the option that excludes a comm hook in Python; "" if a hook can be registered.

    Args:
        arguments: Those of DistributedDataParallel's constructor, by name.
    """
    import torch._dynamo

    for name in ("mixed_precision", "delay_all_reduce_named_params"):
        if arguments.get(name):
            return name
    # With a python_reducer, compiled autograd reduces gradients without buckets.
    if str(torch._dynamo.config.optimize_ddp).startswith("python_reducer"):
        return "torch._dynamo.config.optimize_ddp = 'python_reducer'"
    trained = (parameter for parameter in arguments["module"].parameters() if parameter.requires_grad)
    first = next(trained, None)
    device = first.device.type if first is not None else "cpu"
    if device != "cpu" and backend_of(_group(arguments), device) == "gloo":
        return f"gloo with tensors on {device}"
    return ""


@by_name
def _register(call, instance, state, hook):
    """Accept the program's comm hook although holmes's hook holds the only place in the reducer.

    A hook of torch that averages only sets the dtype of the two levels. Any other hook is called by holmes's
    hook in place of the two levels (two_level_hook).
    """
    import torch.distributed as dist

    reducer = _reducers.get(instance)
    if reducer is None or reducer.has_registered_hook:
        return call()  # without holmes's hook, or to let torch refuse the program's second hook

    call.refuse_unread_arguments()
    instance._check_comm_hook(hook)
    instance.logger._set_comm_hook_name(hook.__qualname__)
    effect = _effect_of(hook)
    reducer.has_registered_hook = True
    hook_group = state or dist.group.WORLD  # the state of torch's averaging hooks is their process group
    if effect.is_average and hook_group is instance.process_group:
        reducer.wire_dtype = effect.wire_dtype
        return

    reducer.program_hook = (state, hook)
    current = session.require()
    ranks = group_ranks(instance.process_group)
    tell(
        current,
        f"the comm hook {hook.__qualname__} reduces DistributedDataParallel's buckets; holmes's "
        f"two levels do not",
        once=True,
    )
    noted = current.reductions.get(tuple(ranks))
    if noted:  # at construction it was noted that two levels reduce
        session.note_reduction(
            ranks, noted.planned, noted.bytes, two_levels=False, overlap=True, reported=True
        )


@by_name
def _register_builtin(call, instance, comm_hook_type):
    """Register a built-in hook (C++) as the Python hook of the same effect, which _register accepts.

    The built-in hooks of torch are allreduce_hook and fp16_compress_hook.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    reducer = _reducers.get(instance)
    if reducer is None or reducer.has_registered_hook:
        return call()
    call.refuse_unread_arguments()
    hook = getattr(default_hooks, f"{comm_hook_type.name.lower()}_hook")
    instance.register_comm_hook(instance.process_group, hook)


def _effect_of(hook: Any) -> HookEffect:
    """Return what a comm hook does with a bucket, if it is one of torch's averaging hooks.

    fp16_compress_wrapper(hook) returns a new function, which is recognized by its qualified name. It averages
    if the hook inside it, a variable of its closure, is allreduce_hook.
    """
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if hook is default_hooks.allreduce_hook:
        return HookEffect(is_average=True)
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        if hook is getattr(default_hooks, f"{name}_compress_hook"):
            return HookEffect(is_average=True, wire_dtype=dtype)
        if getattr(hook, "__qualname__", "").startswith(f"{name}_compress_wrapper."):
            inner_hook = inspect.getclosurevars(hook).nonlocals["hook"]
            return HookEffect(is_average=inner_hook is default_hooks.allreduce_hook, wire_dtype=dtype)
    return HookEffect(is_average=False)


@by_name
def _keep_join_count(call, instance, joinable):
    """Keep the Work that Join.notify_join_context returns: it counts the ranks that still have inputs.

    join(divide_by_initial_world_size=False) divides the gradients by this count. Outside join() there is no
    Work.
    """
    work = call()
    reducer = _reducers.get(joinable)
    if reducer:
        reducer.ranks_with_inputs = work
    return work


PATCHES = (
    Patch(DDP_HOOK, f"{_DDP}.__init__",
          "the comm hook must be there before the first forward pass; scripts do not know it", _construct,
          parameters=("module", "process_group", "bucket_cap_mb")),
    Patch(DDP_HOOK, f"{_DDP}.register_comm_hook",
          "a reducer takes one hook: the program's own goes before ours", _register),
    Patch(DDP_HOOK, f"{_DDP}._register_builtin_comm_hook", "the same for hooks written in C++",
          _register_builtin),
    Patch(DDP_HOOK, "torch.distributed.algorithms.join:Join.notify_join_context",
          "join(divide_by_initial_world_size=False) divides by a count that only this work holds",
          _keep_join_count),
)  # fmt: skip
