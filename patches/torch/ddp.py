"""Reduces DistributedDataParallel's buckets in two levels, if the plan does so for a group over clusters.

The two levels are a comm hook, which is public in torch and replaces only the sum of a bucket. DDP's reducer
(C++) still decides which gradients form a bucket, when it is reduced and into which .grad. So no_sync(),
unused parameters, static_graph and gradient_as_bucket_view work as in stock.

The hook is registered at construction: a rank without inputs under join() never runs a forward pass, but must
sum its zeros like all other ranks. A reducer takes a single hook. So if the program registers one, holmes's
hook stays and changes what it does:

    the program registers                   a bucket is reduced by
    nothing, allreduce_hook                 two levels
    {fp16,bf16}_compress_hook (_wrapper)    two levels, in float16 or bfloat16
    any other hook                          the program's hook; a message says so

With an option that excludes a hook (_stays_stock()) the reduction stays stock's, and a message says so.
Inside one cluster, and where a single ring is faster, nothing changes.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name, with_session
from holmes_ext.patches.torch.buckets import Buckets
from holmes_ext.patches.torch.features import DDP_HOOK
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.backend import backend_of, group_ranks
from holmes_ext.runtime.groups.grid import tell

_DDP = "torch.nn.parallel.distributed:DistributedDataParallel"
#: DistributedDataParallel -> its buckets' way.
_installed: weakref.WeakKeyDictionary[Any, Buckets] = weakref.WeakKeyDictionary()


def begin_later(ddp: Any) -> Buckets | None:
    """The buckets of a pipeline's stage, which finish() ends from now on; None where DDP ends them itself: a
    hook of the program's own, or unused parameters, of which only DDP knows."""
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(ddp, DistributedDataParallel):
        return None
    if ddp not in _installed and not ddp._comm_hooks and ddp.process_group.size() > 1:
        given = {"module": ddp.module, "process_group": ddp.process_group,
                 "mixed_precision": ddp.mixed_precision,
                 "delay_all_reduce_named_params": ddp._delay_all_reduce_params}
        if not _stays_stock(given):
            _install(ddp)
    state = _installed.get(ddp)
    if state is None or state.user or ddp.find_unused_parameters or ddp.static_graph:
        return None
    state.later = []
    return state


def two_level_hook(state, bucket):
    """The comm hook; not annotated, since DDP compares the annotations."""
    if state.user is not None:
        user_state, hook = state.user
        return hook(user_state, bucket)
    return state.reduce(bucket)


@with_session
@by_name
def _construct(current, call, instance):
    """Construct a DistributedDataParallel, and register the comm hook if the plan needs one.

    The plan needs the hook to reduce in two levels, and on the CPU for --holmes-apart, which may sum
    gradients inside each cluster only. With two levels a bucket has the plan's size, unless the program gives
    a size itself.
    """
    given = call.given()
    planned_sum = _sums(given)
    reason_for_stock = _stays_stock(given)
    is_two_level = planned_sum is not None and planned_sum.two_level is not None
    may_train_apart = (
        planned_sum is not None
        and planned_sum.device_type == "cpu"
        and planned_sum.apart.settings is not None
    )
    needs_hook = (is_two_level or may_train_apart) and not reason_for_stock
    has_bucket_size = "bucket_cap_mb" in given or "bucket_cap_mb_list" in given

    if needs_hook and is_two_level and not has_bucket_size:
        call(bucket_cap_mb=planned_sum.reduction.chunk_bytes / 2**20)
    else:
        call()

    if needs_hook:
        _install(instance, planned_sum)
        weakref.finalize(instance, planned_sum.close).atexit = False
    elif is_two_level:
        tell(
            current,
            f"DistributedDataParallel reduces as torch does, on one level, because of {reason_for_stock}",
            once=True,
        )
    elif current.options.telemetry and not reason_for_stock:
        _install(instance)  # torch's own reduction, started from Python, where telemetry sees it

    if planned_sum is None:
        return
    session.note_reduction(
        planned_sum.ranks,
        planned_sum.reduction,
        planned_sum.size,
        two_levels=is_two_level and not reason_for_stock,
        overlap=True,
        reported=bool(reason_for_stock),
    )
    if not needs_hook:
        planned_sum.close()


def _install(ddp: Any, sums: Any = None) -> None:
    """sums: the plan's; None: torch's own, from Python: telemetry sees it, a pipeline may end it later."""
    from holmes_ext.runtime.reduce.straddling import flat_all_reduce

    all_reduce = sums.all_reduce if sums is not None else flat_all_reduce(ddp.process_group)
    state = Buckets(ddp, all_reduce, sums)
    ddp.register_comm_hook(state, two_level_hook)
    _installed[ddp] = state


def _sums(given: dict[str, Any]) -> Any:
    """The plan's way for the gradients of given["module"]; None for what DDP refuses."""
    from torch.nn.parameter import UninitializedParameter

    from holmes_ext.runtime.reduce.straddling import GroupSum

    trained = [p for p in given["module"].parameters() if p.requires_grad]
    if not trained or any(isinstance(p, UninitializedParameter) for p in trained):
        return None
    size, device_type = sum(p.nbytes for p in trained), trained[0].device.type
    return GroupSum(_group(given), size, device_type, None, None, None, trained)


def _group(given: dict[str, Any]) -> Any:
    import torch.distributed as dist

    mesh = given.get("device_mesh")
    return given.get("process_group") or (mesh.get_group(0) if mesh is not None else dist.group.WORLD)


def _stays_stock(given: dict[str, Any]) -> str:
    """The option that a hook does not go with; "" for none."""
    import torch._dynamo

    for name in ("mixed_precision", "delay_all_reduce_named_params"):
        if given.get(name):
            return name
    if str(torch._dynamo.config.optimize_ddp).startswith("python_reducer"):  # compiled autograd's
        return "torch._dynamo.config.optimize_ddp = 'python_reducer'"
    device = next((p.device.type for p in given["module"].parameters() if p.requires_grad), "cpu")
    on_gpu = device != "cpu" and backend_of(_group(given), device) == "gloo"
    return f"gloo with tensors on {device}" if on_gpu else ""


@by_name
def _register(call, instance, state, hook):
    """Accept the program's comm hook although holmes's hook holds the only place in the reducer.

    A hook of torch that averages only sets the dtype of the two levels. Any other hook is called by holmes's
    hook in place of the two levels (two_level_hook).
    """
    import torch.distributed as dist

    ours = _installed.get(instance)
    if ours is None or ours.registered:  # torch refuses the program's second hook itself
        return call()

    call.refuse_unknown()
    instance._check_comm_hook(hook)
    instance.logger._set_comm_hook_name(hook.__qualname__)
    averages, wire = _wire_of(hook)
    ours.registered = True
    hook_group = state or dist.group.WORLD
    if averages and hook_group is instance.process_group:
        ours.wire = wire
        return

    ours.user = (state, hook)
    current = session.require()
    ranks = group_ranks(instance.process_group)
    tell(current, f"the comm hook {hook.__qualname__} reduces DistributedDataParallel's buckets; holmes's "
                  f"two levels do not", once=True)
    if noted := current.reductions.get(tuple(ranks)):
        session.note_reduction(ranks, noted.planned, noted.bytes, two_levels=False, overlap=True,
                               reported=True)


@by_name
def _register_builtin(call, instance, comm_hook_type):
    """Register a built-in hook (C++) as the Python hook of the same effect, which _register accepts.

    The built-in hooks of torch are allreduce_hook and fp16_compress_hook.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    ours = _installed.get(instance)
    if ours is None or ours.registered:
        return call()
    call.refuse_unknown()
    hook = getattr(default_hooks, f"{comm_hook_type.name.lower()}_hook")
    instance.register_comm_hook(instance.process_group, hook)


def _wire_of(hook: Any) -> tuple[bool, Any]:
    """(whether it is a plain average, the dtype that travels or None)"""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        if hook is getattr(default_hooks, f"{name}_compress_hook"):
            return True, dtype
        if getattr(hook, "__qualname__", "").startswith(f"{name}_compress_wrapper."):
            return inspect.getclosurevars(hook).nonlocals["hook"] is default_hooks.allreduce_hook, dtype
    return hook is default_hooks.allreduce_hook, None


@by_name
def _count_joining(call, instance, joinable):
    """Keep the Work that Join.notify_join_context returns: it counts the ranks that still have inputs.

    join(divide_by_initial_world_size=False) divides the gradients by this count. Outside join() there is no
    Work.
    """
    work = call()
    if state := _installed.get(joinable):
        state.joining = work
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
          _count_joining),
)  # fmt: skip
