"""DistributedDataParallel's buckets in two levels, where its group straddles clusters and the plan says so.

    DDP's reducer (C++)   which gradients travel together, when, into which .grad: as it is, so no_sync(),
                          unused parameters, static_graph and gradient_as_bucket_view are what they were
    comm hook (public)    only a bucket's sum takes another way: divided by the ranks before, as in stock

The hook is there from construction on: a rank without inputs under join() never sees a forward pass, and must
sum its zeros as all others do. The reducer takes one hook only, so ours gives way from inside:

    the program registers                   what reduces
    nothing, allreduce_hook                 two levels
    {fp16,bf16}_compress_hook (_wrapper)    two levels, of float16 or bfloat16
    any other hook                          that hook, as if ours were not there; one line says so

Stock, with one line: mixed_precision, whose own hook upcasts what it reduces, and whatever else
_stays_stock() names. Inside one cluster, and where one ring is faster, nothing is touched.
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
    """DistributedDataParallel(...): the hook and size of buckets for two levels; the hook to go apart."""
    given = call.given()
    sums, reason = _sums(given), _stays_stock(given)
    two_level = sums is not None and sums.two_level is not None
    apart = sums is not None and sums.device_type == "cpu" and sums.apart.settings is not None
    hooked = (two_level or apart) and not reason
    if hooked and two_level and not {"bucket_cap_mb", "bucket_cap_mb_list"} & given.keys():
        call(bucket_cap_mb=sums.reduction.chunk_bytes / 2**20)
    else:
        call()
    if hooked:
        _install(instance, sums)
        weakref.finalize(instance, sums.close).atexit = False
    elif two_level:
        tell(current, f"DistributedDataParallel reduces as torch does, on one level, because of {reason}",
             once=True)
    elif current.options.telemetry and not reason:
        _install(instance)
    if sums is not None:
        session.note_reduction(sums.ranks, sums.reduction, sums.size, two_levels=two_level and not reason,
                               overlap=True, reported=bool(reason))
        if not hooked:
            sums.close()


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
    """register_comm_hook of the program, where ours is in place."""
    import torch.distributed as dist

    ours = _installed.get(instance)
    if ours is None or ours.registered:  # torch says that one hook is the limit
        return call()
    call.refuse_unknown()
    instance._check_comm_hook(hook)
    instance.logger._set_comm_hook_name(hook.__qualname__)
    averages, wire = _wire_of(hook)
    ours.registered = True
    if averages and (state or dist.group.WORLD) is instance.process_group:
        ours.wire = wire
        return
    ours.user = (state, hook)
    current, ranks = session.require(), group_ranks(instance.process_group)
    tell(current, f"the comm hook {hook.__qualname__} reduces DistributedDataParallel's buckets; holmes's "
                  f"two levels do not", once=True)
    if noted := current.reductions.get(tuple(ranks)):
        session.note_reduction(ranks, noted.planned, noted.bytes, two_levels=False, overlap=True,
                               reported=True)


@by_name
def _register_builtin(call, instance, comm_hook_type):
    """The same for allreduce_hook and fp16_compress_hook, written in C++."""
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
    """Join.notify_join_context: the work that counts the ranks which have inputs, None outside join()."""
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
