"""Switches holmes on and off in a process: by flags (activate) or by calls (enable, disable)."""

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
from holmes_ext.patches.deepspeed import ds_config
from holmes_ext.patches.megatron.command_line.describe import (
    describe,
    model_from_arguments,
    overlaps,
    sizes_from_arguments,
)
from holmes_ext.patches.traits import engine_of
from holmes_ext.plan import maker
from holmes_ext.plan.maker import PlanRequest
from holmes_ext.plan.sizes import parse_sizes
from holmes_ext.runtime import hooks, session
from holmes_ext.runtime.start import launcher
from holmes_ext.runtime.start.rank import start
from holmes_ext.runtime.watch import failure, start_stop

if TYPE_CHECKING:
    from types import TracebackType

    from holmes_ext.runtime.watch.metrics import Metrics

#: Environment variable -> its value before activation, which disable() restores; None if it was not set.
_before: dict[str, str | None] = {}
#: Environment variables that an activation may change.
_CHANGED_VARIABLES = (
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
    """Switch holmes on by the flags of a command line.

    Args:
        argv: Command line, mostly sys.argv. The flags of holmes are removed, in place.

    Raises:
        SystemExit: the input is bad (status 2). One rank has printed a message.
    """
    flag_error = None
    options = Options()  # defaults, which remain if the flags are wrong
    try:
        try:
            options, argv[:] = parse_flags(argv, os.environ)
        except HolmesError as error:
            # All ranks have the same wrong flags. _start() makes one of them print the message.
            flag_error = error
        sys.excepthook = _excepthook_over(sys.excepthook)
        _start(options, argv, flag_error)
    except RemoteError:  # another rank has printed the message
        sys.stderr.flush()
        raise SystemExit(2) from None
    except HolmesError as error:
        print(f"holmes: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def _excepthook_over(previous_hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a sys.excepthook that shortens errors of holmes and explains errors of communication.

    A HolmesError is printed as one line without a traceback, and ends the process with status 2.
    Any other error is shown by the previous hook. After an error of communication, or of a full
    disk, a line of explanation follows, such as the NIC and the node. If another rank has ended
    because of bad input, the message of that rank is printed instead, also with status 2.

    Args:
        previous_hook: The hook that was installed before, such as Python's own or torch's.
    """

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        """Print an exception that ends the process, and choose the exit status; see sys.excepthook."""
        if issubclass(kind, RemoteError):  # another rank has printed the message
            raise SystemExit(2)
        if issubclass(kind, HolmesError):
            # Not sys.stderr: torch.distributed's hook puts a buffer there, which SystemExit does not print.
            print(f"holmes: {error}", file=sys.__stderr__, flush=True)
            failure.note(str(error))  # for ranks that only see this rank end: they print it, too
            raise SystemExit(2)
        explanation = _explain(error)  # None, unless communication or a full disk caused the error
        # The message of another rank that ended because of bad input begins with INPUT.
        if explanation and explanation.startswith(failure.INPUT):
            print(explanation, file=sys.__stderr__, flush=True)
            raise SystemExit(2)
        previous_hook(kind, error, traceback)
        if explanation:
            sys.stderr.write(f"holmes: {explanation}\n")
            sys.stderr.flush()

    return hook


def _explain(error: BaseException) -> str | None:
    """Return a line that explains an error to the user; None if nothing is known about it.

    Known are errors of communication and of a full disk. If another rank has ended because of bad
    input before, the line is the message of that rank, after the prefix failure.INPUT.

    The process is ending, so anything may be broken by now. If explaining fails itself, the line
    has the reason for that.
    """
    try:
        return failure.explain(error)
    except Exception as trouble:
        return f"this error cannot be explained ({type(trouble).__name__}: {trouble})"


def enable(plan: str | os.PathLike[str] | None = None, **options: Any) -> None:
    """Switch holmes on in this process, like --holmes. Call this function before init_process_group.

    Args:
        plan: Path of a plan.json, as for --holmes-plan; None to make a plan now.
        options: Values of flags by their names without --holmes-: cluster="c.toml", sizes="pipeline=2", ...
            An option that is not given has the value of its environment variable (HOLMES_CLUSTER, ...).

    Raises:
        HolmesError: the input is bad, torch.distributed is initialized already, which fixes the ranks, or
            holmes is on.
    """
    if session.active() is not None:
        raise HolmesError("holmes is already active in this process; call disable() first")
    # Modules that are imported above have imported torch.distributed.
    if sys.modules["torch.distributed"].is_initialized():
        raise HolmesError(
            "enable() comes too late: torch.distributed is initialized; call it before that"
        )
    values = {**from_environment(os.environ), **options}
    if plan is not None:
        values["plan"] = os.fspath(plan)
    _start(options_from(**values), sys.argv[1:])


def enable_on_nodes(cluster: str | None) -> None:
    """Switch holmes on for `holmes probe` and `holmes doctor`, which are no jobs.

    The number of processes on a node need not be the one in cluster.toml.

    Args:
        cluster: Path of a cluster.toml; None to identify the clusters by the nodes' NICs.
    """
    options = options_from(cluster=cluster) if cluster else options_from()
    _start(options, argv=[], counted=False)


def disable() -> None:
    """Switch holmes off: undo all patches and restore the environment.

    Existing process groups keep their networks.
    """
    start_stop.stop("holmes was switched off")
    patches.registry().undo()
    session.set_active(None)
    # _before: name of a changed environment variable -> its value before; None if it was not set.
    for name, value in _before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _before.clear()


def plan_request(options: Options, argv: list[str]) -> PlanRequest:
    """Return what the plan of a job is made from: options, parallel sizes and model.

    Args:
        options: Options of the job.
        argv: Arguments of the program, from which sizes and model are read if options do not give them.

    Raises:
        HolmesError: the sizes or the model are missing, or Python runs without the GIL.
    """
    python_without_gil = patches.without_gil()  # a message; "" for Python with the GIL
    if python_without_gil:
        raise HolmesError(
            f"{python_without_gil} (free-threaded), with which nobody tried holmes: {patches.WITH_GIL}"
        )
    # What the plan must take into account of the framework.
    engine = engine_of(describe(argv).framework, argv)
    request = PlanRequest(options, overlap=overlaps(options.overlap, argv), engine=engine)
    given_sizes = parse_sizes(options.sizes, "--holmes-sizes") if options.sizes else None
    request.sizes = given_sizes or sizes_from_arguments(argv)
    if not options.model:
        request.model = model_from_arguments(argv, needed=options.needs_model)
    return request


def _start(
    options: Options, argv: list[str], error: HolmesError | None = None, counted: bool = True
) -> None:
    """Apply the patches, agree on a plan with all ranks, and print the start line.

    An error of one rank must end all of them, so it is passed on to start(), where the ranks meet.

    Args:
        options: Options of the job.
        argv: Arguments of the program.
        error: Error in the flags of this rank, or None.
        counted: Whether the number of processes on a node must be the one in cluster.toml.
    """
    process = launcher.detect(os.environ)
    registry = patches.registry()
    for name in _CHANGED_VARIABLES:
        _before[name] = os.environ.get(name)
    if process.rank != 0:
        # Features are on or off equally on all ranks (agree_on_patches() checks it): rank 0 prints them.
        logging.getLogger("holmes_ext.patches").setLevel(logging.ERROR)
    versions = patches.installed_versions(patches.core_features())
    agreed = {  # must be equal on all ranks
        "HOLMES_DISABLE": os.environ.get("HOLMES_DISABLE", ""),
        "installed frameworks": ", ".join(
            f"{name} {version}" for name, version in versions.items()
        ),
    }
    config = ds_config.from_arguments(argv)
    if config is not None:
        agreed["content of the --deepspeed_config file"] = config.digest
    extension_lines: list[str] = []
    metrics: Metrics | None = None
    request = PlanRequest(options)
    try:
        try:
            request = plan_request(options, argv)
            extension_lines = [*extensions.problems(), *extensions.on_options(options)]
            if options.experts:
                load_order = extensions.load("holmes_ext.plan.experts:load_order")
                agreed["content of the --holmes-experts file"] = load_order(options.experts).digest
            registry.add(patches.extension_patches(options))
            registry.enable_for_options(options)
            request.options = replace(options, off=registry.switched_off())
            if options.metrics:
                open_metrics = extensions.load("holmes_ext.runtime.watch.metrics:open_metrics")
                metrics = open_metrics(options, process)
        except HolmesError as later_error:
            error = error or later_error
        request.counted = counted
        current, lines = start(request, maker, process, agreed, error)
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
    hooks.on_ready(current)
