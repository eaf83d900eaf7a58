"""Switching holmes on and off in a process: by flag (activate) or by call (enable, disable)."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from holmes_ext import banner, extensions, patches
from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.options import Options, from_environment, options_from, parse_flags
from holmes_ext.patches.conflicts import WITH_GIL, without_gil
from holmes_ext.patches.deepspeed import ds_config
from holmes_ext.patches.megatron.command_line.describe import (
    describe,
    model_from_arguments,
    overlaps,
    sizes_from_arguments,
)
from holmes_ext.patches.traits import engine_of
from holmes_ext.plan import maker
from holmes_ext.plan.experts import load_order
from holmes_ext.plan.maker import PlanRequest
from holmes_ext.plan.sizes import parse_sizes
from holmes_ext.runtime import session
from holmes_ext.runtime.start import launcher
from holmes_ext.runtime.start.rank import start
from holmes_ext.runtime.watch import failure, start_stop

if TYPE_CHECKING:
    from holmes_ext.runtime.watch.metrics import Metrics

#: Environment variables before activation, to be put back by disable().
_before: dict[str, str | None] = {}
_TOUCHED = (
    *launcher.RANK_VARIABLES,
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
    "NCCL_NET",
)


def activate(argv: list[str]) -> None:
    """Strip the flags from `argv` (in place, mostly sys.argv) and start; bad input ends with status 2."""
    trouble = None
    try:
        try:
            options, argv[:] = parse_flags(argv, os.environ)
        except HolmesError as error:  # told through the store, once, with the rank
            options, trouble = Options(), error
        sys.excepthook = _one_line(sys.excepthook)
        _start(options, argv, trouble)
    except RemoteError:
        sys.stderr.flush()
        raise SystemExit(2) from None
    except HolmesError as error:
        print(f"holmes: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def _one_line(show: Callable[..., Any]) -> Callable[..., Any]:
    """An excepthook: a HolmesError from a hook of ours is one line, with status 2. An error of the
    framework's communication gets a line after its traceback (which NIC, which node), unless another rank has
    told what it refused."""

    def hook(kind, error, traceback):
        if not issubclass(kind, HolmesError):
            line = _explain(error)
            if line and line.startswith(failure.INPUT):
                print(line, file=sys.__stderr__, flush=True)
                raise SystemExit(2)
            show(kind, error, traceback)
            if line:
                sys.stderr.write(f"holmes: {line}\n")
                sys.stderr.flush()
            return
        if not issubclass(kind, RemoteError):
            # Not sys.stderr: torch.distributed's hook puts a buffer there, which SystemExit does not print.
            print(f"holmes: {error}", file=sys.__stderr__, flush=True)
            failure.note(str(error))
        raise SystemExit(2)

    return hook


def _explain(error: BaseException) -> str | None:
    """failure.explain, whatever may be broken by now."""
    try:
        return failure.explain(error)
    except Exception as trouble:
        return f"this error cannot be explained ({type(trouble).__name__}: {trouble})"


def enable(plan: str | os.PathLike[str] | None = None, **options: Any) -> None:
    """Switch holmes on in this process, before init_process_group; the same as --holmes.

    Args:
        plan: The path of a plan.json, as --holmes-plan; None: a plan is made now.
        options: The values of flags by their names without --holmes-: cluster="c.toml", sizes="pipeline=2",
            ... An option that is left out has the value of its environment variable (HOLMES_CLUSTER, ...).

    Raises:
        HolmesError: The input is bad, torch.distributed is initialized already (the ranks are fixed by
            then), or holmes is on.
    """
    if session.active() is not None:
        raise HolmesError("holmes is already active in this process; call disable() first")
    if sys.modules["torch.distributed"].is_initialized():
        raise HolmesError(
            "enable() comes too late: torch.distributed is initialized; call it before that"
        )
    values = {
        **from_environment(os.environ),
        **options,
    }  # an argument overrides its environment variable
    if plan is not None:
        values["plan"] = os.fspath(plan)
    _start(options_from(**values), sys.argv[1:])


def enable_on_nodes(cluster: str | None) -> None:
    """For `holmes probe` and `holmes doctor`: as enable(), with any number of processes on a node, whatever
    cluster.toml says, and without the command line of a job."""
    _start(options_from(**({"cluster": cluster} if cluster else {})), [], counted=False)


def disable() -> None:
    """Undo every patch and put the environment back; process groups that exist keep their transport."""
    start_stop.stop("holmes was switched off")
    patches.registry().undo()
    session.set_active(None)
    for name, value in _before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _before.clear()


def asked_for(options: Options, argv: list[str]) -> PlanRequest:
    """What arguments and options ask for; HolmesError where they say too little, or without the GIL."""
    if lack := without_gil():
        raise HolmesError(f"{lack} (free-threaded), with which nobody tried holmes: {WITH_GIL}")
    engine = engine_of(describe(argv).framework, argv)
    request = PlanRequest(options, overlap=overlaps(options.overlap, argv), engine=engine)
    said = parse_sizes(options.sizes, "--holmes-sizes") if options.sizes else None
    request.sizes = said or sizes_from_arguments(argv)
    if not options.model:
        request.model = model_from_arguments(argv, needed=options.needs_model)
    return request


def _start(
    options: Options, argv: list[str], trouble: HolmesError | None = None, counted: bool = True
) -> None:
    process = launcher.detect(os.environ)
    registry = patches.registry()
    _before.update({name: os.environ.get(name) for name in _TOUCHED})
    if (
        process.rank != 0
    ):  # what is off and why is the same everywhere, or agree_on_patches() ends the job
        logging.getLogger("holmes_ext.patches").setLevel(logging.ERROR)
    installed = ", ".join(
        map(" ".join, patches.installed_versions(patches.core_features()).items())
    )
    agreed = {
        "HOLMES_DISABLE": os.environ.get("HOLMES_DISABLE", ""),
        "installed frameworks": installed,
    }
    config = ds_config.from_arguments(argv)
    if config is not None:
        agreed["content of the --deepspeed_config file"] = config.digest
    extension_lines: list[str] = []
    metrics: Metrics | None = None
    request = PlanRequest(options)
    try:
        try:
            request = asked_for(options, argv)
            extension_lines = [*extensions.problems(), *extensions.on_options(options)]
            if options.experts:
                agreed["content of the --holmes-experts file"] = load_order(options.experts).digest
            registry.add(patches.extension_patches(options))
            registry.enable_for_options(options)
            request.options = replace(options, off=registry.switched_off())
            if options.metrics:
                open_metrics = extensions.load("holmes_ext.runtime.watch.metrics:open_metrics")
                metrics = open_metrics(options, process)
        except HolmesError as error:
            trouble = trouble or error
        request.counted = counted
        current, lines = start(request, maker, process, agreed, trouble)
        lines += extension_lines
        if config is not None:
            lines += ds_config.checked(config, current)
    except BaseException:
        registry.undo()
        if metrics is not None:
            metrics.close()
        raise
    if options.fsdp == "hybrid":
        atexit.register(extensions.load("holmes_ext.patches.torch.fsdp:tell_unused"), current)
    banner.show(current, lines + start_stop.start(current, metrics))
