"""Switching holmes on and off in a process: by flag (activate) or by call (enable, disable)."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.options import Options, options_from, parse_flags
from holmes_ext.runtime import session
from holmes_ext.runtime.start import launcher
from holmes_ext.runtime.start.exchange import RemoteError

#: Environment variables before activation, to be put back by disable().
_before: dict[str, str | None] = {}
_TOUCHED = (
    *launcher.RANK_VARIABLES, "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_NET",
)  # fmt: skip


def activate(argv: list[str]) -> None:
    """Read and strip the flags from `argv` (in place, normally sys.argv), and start; ends the process with status 2 on bad input."""
    failure = None
    try:
        try:
            options, argv[:] = parse_flags(argv, os.environ)
        except HolmesError as error:  # told through the store, once, with the rank
            options, failure = Options(), error
        sys.excepthook = _one_line(sys.excepthook)
        _start(options, argv, failure)
    except RemoteError:
        sys.stderr.flush()
        raise SystemExit(2) from None
    except HolmesError as error:
        print(f"holmes: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def _one_line(show):
    """An excepthook that tells a HolmesError raised inside the script (from a hook of ours) as one line, with status 2.

    An error of the framework's own communication gets a line after its traceback: which NIC, which node.
    """

    def hook(kind, error, traceback):
        if not issubclass(kind, HolmesError):
            show(kind, error, traceback)
            if "torch" in sys.modules and (line := _explain(error)):
                sys.stderr.write(f"holmes: {line}\n")
                sys.stderr.flush()
            return
        if not issubclass(kind, RemoteError):
            # Not sys.stderr: torch.distributed's own hook puts a buffer in its place, which SystemExit leaves unprinted.
            print(f"holmes: {error}", file=sys.__stderr__, flush=True)
        raise SystemExit(2)

    return hook


def _explain(error):
    """failure.explain, whatever may be broken by now."""
    try:
        from holmes_ext.runtime.watch.failure import explain

        return explain(error)
    except Exception as trouble:
        return f"what the error means cannot be told ({type(trouble).__name__}: {trouble})"


def enable(plan: str | os.PathLike | None = None, **options: Any) -> None:
    """Switch holmes on in this process, before init_process_group; the same as --holmes with --holmes-plan `plan`.

    options: cluster, sizes, partition, model, timeout, verbose - as the flags of these names. HolmesError when the input is bad, when torch.distributed
    is initialized already (the ranks are fixed by then), or when holmes is on already.
    """
    if session.active() is not None:
        raise HolmesError("holmes is already active in this process; call disable() first")
    if "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized():
        raise HolmesError("enable() comes too late: torch.distributed is initialized; call it before init_process_group")
    values = options if plan is None else {**options, "plan": os.fspath(plan)}
    _start(options_from(**values), sys.argv[1:])


def disable() -> None:
    """Undo every patch and put the environment back; process groups that exist keep their transport."""
    from holmes_ext.patches import registry
    from holmes_ext.runtime.watch import start_stop

    start_stop.stop()
    registry().undo()
    session.set_active(None)
    for name, value in _before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _before.clear()


def _start(options: Options, argv: list[str], failure: HolmesError | None = None) -> None:
    from holmes_ext.patches import installed_versions, registry
    from holmes_ext.patches.deepspeed import ds_config
    from holmes_ext.patches.megatron import arguments
    from holmes_ext.plan.sizes import parse_sizes
    from holmes_ext.runtime.start.rank import start
    from holmes_ext.runtime.watch import start_stop

    process = launcher.detect(os.environ)
    _before.update({name: os.environ.get(name) for name in _TOUCHED})
    sizes, patches = None, registry()
    if process.rank != 0:  # what is off and why is the same everywhere, or agree_on_patches() ends the job
        logging.getLogger("holmes_ext.patches").setLevel(logging.ERROR)
    agreed = {"HOLMES_DISABLE": os.environ.get("HOLMES_DISABLE", ""), "installed frameworks": ", ".join(map(" ".join, installed_versions().items()))}
    config = ds_config.from_arguments(argv)
    if config is not None:
        agreed["content of the --deepspeed_config file"] = config.digest
    try:
        model = None
        try:
            sizes = parse_sizes(options.sizes, "--holmes-sizes") if options.sizes else arguments.sizes_from_arguments(argv)
            model = arguments.model_from_arguments(argv) if options.partition in ("speed", "balanced") else None
            patches.enable_asked_for(options)
        except HolmesError as error:
            failure = failure or error
        current, lines = start(options, process, sizes, agreed, failure, model=model, overlap=arguments.overlaps(options.overlap, argv))
        if config is not None:
            lines = [*lines, *_check_config(config, current)]
    except BaseException:
        patches.undo()
        raise
    lines += start_stop.start(current)
    if current.rank == 0:
        for line in [describe(current), *lines]:
            print(f"holmes: {line}", file=sys.stderr, flush=True)



def _check_config(config, current: session.Session) -> list[str]:
    """ds_config.check; the file and the plan are the same on all ranks, so rank 0 alone says what is wrong."""
    from holmes_ext.patches.deepspeed import ds_config

    overlap = current.options.overlap if current.options.overlap != "auto" else None
    try:
        return ds_config.check(config, current.plan, overlap)
    except HolmesError as error:
        raise error if current.rank == 0 else RemoteError(str(error)) from None


def describe(current: session.Session) -> str:
    """One line: clusters found, order of the nodes, stages and layers, which groups use which NIC, what is patched and what is not."""
    return "; ".join(filter(None, [_describe_ranks(current), _describe_plan(current), _describe_patches()]))


def _describe_plan(current: session.Session) -> str:
    """ "pipeline 2 x data 2, layers as the framework splits them; data on ib and roce, pipeline on ethernet"."""
    plan, site = current.plan, current.site
    if plan.sizes is None:
        return ""
    sizes = plan.sizes
    named = [f"{name} {getattr(sizes, name)}" for name in ("pipeline", "tensor", "context", "data") if getattr(sizes, name) > 1]
    text = " x ".join(named) or "one process"
    if sizes.pipeline > 1:
        text += f", layers {'+'.join(map(str, plan.stage_layers))}" if plan.stage_layers else ", layers as the framework splits them"
    kinds = {}
    for kind, fabrics in plan.transports.items():
        if getattr(sizes, kind, 2) == 1:  # "world" has no size of its own
            continue
        names = dict.fromkeys(site.fabric_by_name[name].kind if name in site.fabric_by_name else "memory" for name in fabrics)
        kinds.setdefault(" and ".join(names), []).append(kind)
    return "; ".join(filter(None, [text, ", ".join(f"{', '.join(kind)} groups on {where}" for where, kind in kinds.items())]))


def _describe_patches() -> str:
    """Features that are on, and those that are off though their framework is there."""
    from holmes_ext.patches import registry

    on, off = registry().summary()
    text = f"patched: {', '.join(on) or 'nothing'}"
    return text + (f"; not patched: {', '.join(f'{feature} ({reason})' for feature, reason in off.items())}" if off else "")


def _describe_ranks(current: session.Session) -> str:
    site, plan = current.site, current.plan
    clusters = []
    for name in dict.fromkeys(site.node_by_name[node].cluster for node in plan.nodes):
        nodes = [node for node in site.nodes if node.cluster == name]
        fabric = site.fabric_by_name[nodes[0].ports[0].fabric]
        clusters.append(f"{name} ({len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}, {fabric.kind})")
    moved = "order kept" if plan.nodes == tuple(node.name for node in site.nodes) else "ranks renumbered"
    text = f"{len(clusters)} cluster{'s' * (len(clusters) > 1)}: {' -> '.join(clusters)}; world size {site.world_size}, {moved}"
    if plan.stage_layers:
        text += f"; {plan.partition} stages of {'+'.join(map(str, plan.stage_layers))} layers"
    if plan.straddling:
        text += "; " + ", ".join(f"{s.groups} {s.kind} groups straddle clusters (on {s.fabric})" for s in plan.straddling)
    return text
