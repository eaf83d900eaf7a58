"""Fork server: a Python that imports the modules of a job once and forks its ranks from this process.

Each rank then saves the seconds of its imports. The keeper (the process that owns the lab) starts
the fork server with the environment and the working directory of the job:

    python -c BOOT FOLDERS MODULE,MODULE CONTROL

FOLDERS contain the packages holmes_lab and holmes_ext; CONTROL is the descriptor number of a
socket.

A script in a forked rank finds the same things as in a new Python: sys.argv, sys.path[0],
__main__, the environment, and random numbers. holmes is not activated in the fork server, but in
each rank. If a job does not use holmes, its ranks have none of holmes's modules.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

from holmes_ext import _pth
from holmes_ext.errors import HolmesError
from holmes_ext.extensions import GROUP
from holmes_lab.emulate import trace
from holmes_lab.network import namespaces
from holmes_lab.process import launch, wire

_BOOT_OF_FUNCTION = """
import os
import sys
path = list(sys.path)
sys.path[:0] = sys.argv[1].split(os.pathsep)
from holmes_lab.process import fork_server
sys.path[:] = path
entry = fork_server.SERVE(sys.argv[2].split(","), int(sys.argv[3]))
del os, path, sys, fork_server
if entry is not None:
    variables = entry()
"""
#: Program of a fork server, and that of a template (templates.py), the parent of the fork servers of
#: several labs.
BOOT = _BOOT_OF_FUNCTION.replace("SERVE", "serve")
TEMPLATE_BOOT = _BOOT_OF_FUNCTION.replace("SERVE", "serve_template")


#: Seconds that a rank sleeps at its exit, so that gloo's threads can release their last tensors,
#: for which they need the interpreter. Otherwise a job without holmes sometimes aborts or hangs.
#: For jobs with holmes see runtime/groups/callbacks.py.
_RELEASE_S = 0.02
#: Environment variable that makes a rank end without destroying its modules if it is "1".
#: Destroying them takes about 0.3 s of a core, as it copies pages that the rank shares with the
#: fork server. Threads are joined, and functions of atexit run, in any case.
SKIP_TEARDOWN = "HOLMES_LAB_SKIP_TEARDOWN"
#: Framework -> modules that it imports at its first use. That would take seconds in every rank.
_FIRST_USE = {
    "torch": ("torch._dynamo",),
    "deepspeed": (
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "deepspeed.compile.backend",
        "deepspeed.ops.op_builder.all_ops",
        "setuptools",
        "distutils.ccompiler",
        "deepspeed.module_inject.auto_ep_layer",
        "deepspeed.module_inject.auto_ep_presets.registry",
    ),
}
#: Names of the imported modules of holmes_ext and its extensions. Ranks that do not use holmes
#: forget them.
_holmes_modules: set[str] = set()


def script_of(command: list[str]) -> tuple[str, list[str]] | None:
    """Divide the command of a job into its Python and the script.

    Returns:
        (interpreter, [SCRIPT, ...] or ["-m", MODULE, ...]); None if the command is of another form, so that
        a forked Python cannot run it. The flag -u (unbuffered output) is left out, because the
        lab's ranks have PYTHONUNBUFFERED=1 anyway.
    """
    if not command or not Path(command[0]).name.startswith("python"):
        return None
    arguments = command[1:]
    if arguments[:1] == ["-u"]:
        arguments = arguments[1:]
    if arguments[:1] == ["-m"]:
        return (command[0], arguments) if len(arguments) > 1 else None
    return (command[0], arguments) if arguments and not arguments[0].startswith("-") else None


def start(ask: Callable[..., object], log: Path, modules: Sequence[str]) -> socket.socket:
    """Start a fork server, wait until it has imported its modules, and return its control socket.

    A fork server is a Python process that imports modules once, and then forks ranks.

    Args:
        ask: Starts the process, and gives it the names of its modules. Called as
            ask(descriptors=[CONTROL, LOG]): the process's end of the control socket, and `log` as
            an open file for its output.
        log: File for the output of the process.
        modules: Names of the modules, only for the error message.

    Raises:
        HolmesError: A module cannot be imported. The message has the reason.
    """
    ours, theirs = wire.pair()
    with open(log, "wb") as file:
        ask(descriptors=[theirs.fileno(), file.fileno()])
    theirs.close()
    message, _ = wire.receive(ours)
    if message is None or "failed" in message:
        lines = log.read_text(errors="replace").strip().splitlines() or ["no message"]
        raise HolmesError(
            f"--preload {','.join(modules)}: {message['failed'] if message else lines[-1]}"
        )
    return ours


def serve(modules: list[str], control_number: int) -> launch.Entry | None:
    """Run as a fork server of one lab: import the modules, and fork the ranks of jobs from this process.

    The function returns when the process that created the lab closes the control socket, or ends.
    If the keeper (the process that owns the lab) ends, the kernel kills this process.

    Args:
        modules: Names of the modules.
        control_number: Descriptor number of the control socket, which brings the jobs.

    Returns:
        In a forked rank: a function without arguments that runs its script (launch.Entry). In the fork server
        itself: None.
    """
    control = socket.socket(fileno=control_number)
    os.set_inheritable(control_number, False)
    try:
        # This process is in the PID namespace of the lab, but its /proc is that of the machine.
        # Libraries such as psutil look for their own PID there while they are imported.
        with namespaces.own_proc():
            _preload(modules)
    except BaseException as error:
        traceback.print_exc()
        wire.send(control, {"failed": str(error)})
        return None
    wire.send(control, {"ready": True})
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then reaps the forked children
    return _fork_job_supervisors(control)


def serve_template(modules: list[str], control_number: int) -> launch.Entry | None:
    """Run as a template: import the modules once, and fork a fork server into each lab that requests one.

    A lab is a set of emulated nodes whose processes have a PID namespace of their own. A template
    is a Python process outside of all labs, so that several labs share its imports. Its forks, the
    fork servers, fork the ranks of jobs, each in one lab. A template ends when the process that
    started it closes the control socket, or ends.

    Args:
        modules: Names of the modules.
        control_number: Descriptor number of the control socket.

    Returns:
        In a rank: a function without arguments that runs the script of the rank. Ranks are forks of
        this process's forks, so the call returns in each of them, too.
        In a fork server: None, when its lab has ended.
        In the template itself: None, if the modules cannot be imported. Otherwise the template
        exits in this function.
    """
    control = socket.socket(fileno=control_number)
    os.set_inheritable(control_number, False)
    try:
        _preload(modules)
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            raise RuntimeError(f"importing them starts {threads - 1} threads, which a fork loses")
    except BaseException as error:
        traceback.print_exc()
        wire.send(control, {"failed": str(error)})
        return None
    wire.send(control, {"ready": True})
    # The kernel then reaps forked children at once: none remains as a zombie.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors = wire.receive(control)
        if message is None:  # the process that started the template has closed its end
            break
        if os.fork() == 0:
            control.close()
            # "init": PID of the init of the PID namespace of the lab that requests a fork server.
            # _enter_lab() forks the fork server into this namespace.
            return _enter_lab(message["init"], *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
    # The end of this process is the sign that all of its forks have ended (Templates.close).
    _wait_for_children()
    os._exit(0)


def _enter_lab(lab_init: int, control_number: int, log: int) -> launch.Entry | None:
    """Fork a fork server into a lab's PID namespace, from this process, which has imported the modules.

    A process cannot change its own PID namespace, only that of its future children. So this process
    forks once more: its child is the fork server. This process, the guard, waits for the fork
    server's end, and exits. The function returns only in the fork server at its end, and in the
    ranks that it forks.

    Args:
        lab_init: PID of the init of the lab's PID namespace.
        control_number: Descriptor of the fork server's control socket.
        log: Descriptor of the file for the fork server's output.
    """
    try:
        namespaces.enter_for_children(lab_init)
        pid = os.fork()
    except OSError as error:  # the lab has ended
        wire.send(socket.socket(fileno=control_number), {"failed": str(error)})
        os._exit(1)
    if pid != 0:  # in the guard
        os.close(control_number)
        os.close(log)
        _wait_for_children()
        os._exit(0)
    namespaces.die_with_parent()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    control = socket.socket(fileno=control_number)
    wire.send(control, {"ready": True})
    return _fork_job_supervisors(control)


def _wait_for_children() -> None:
    """Wait until all child processes have ended.

    If SIGCHLD is ignored, waitpid() blocks until the last child has ended, and then raises
    ChildProcessError.
    """
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _preload(modules: list[str]) -> None:
    """Import the modules that ranks forked from this process will need.

    Raises:
        ImportError: A module cannot be imported. The message names it.
        RuntimeError: A module has used a GPU while it was imported.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException as error:
            raise ImportError(f"{module}: {error}") from error
    import_for_ranks()
    if uses_emulated_gpu():
        # A fork cannot use a GPU that its parent has used. This is checked once, after all imports, so it
        # does not show which of the modules did it. The message names the last module.
        raise RuntimeError(
            f"{modules[-1]}: it uses a GPU while it is imported, which no fork may share; leave it out"
        )


def _fork_job_supervisors(control: socket.socket) -> launch.Entry | None:
    """Fork a job supervisor, the process that forks the ranks of one job, for each new job.

    The fork server is a Python that has imported the modules of the job; its forks have them, too.

    Args:
        control: Socket that brings the socket of each job, as a file descriptor. Its other end is closed when
            the lab (the emulated nodes) ends.

    Returns:
        The function returns in two kinds of processes. In a rank: a function without arguments that
        runs the script of the rank. In the fork server, at its end: None. In a job supervisor,
        launch.serve_job() exits the process after the job.
    """
    while True:
        message, descriptors = wire.receive(control)
        if message is None:
            return None
        if os.fork() == 0:
            namespaces.die_with_parent()
            control.close()
            return launch.serve_job(socket.socket(fileno=descriptors[0]), run_script)
        os.close(descriptors[0])


def import_for_ranks() -> None:
    """Import modules in this process (the fork server) that each rank would otherwise import later.

    Ranks are forked from this process, and so have these modules from the start. They are of two
    kinds: modules that frameworks such as torch import at their first use, and, if torch has been
    imported, the modules of holmes and of its extensions.

    The names of the modules of holmes and of its extensions are added to _holmes_modules. A rank
    that does not use holmes removes these modules again (_forget_holmes()).
    """
    for framework, modules in _FIRST_USE.items():
        for module in modules if framework in sys.modules else ():
            with contextlib.suppress(ImportError):  # another version, without it
                importlib.import_module(module)
    if "torch" in sys.modules:
        before = set(sys.modules)
        for module in ("holmes_ext.job", "holmes_ext.runtime.reduce.reducer"):
            importlib.import_module(module)
        # all_patches() imports the modules with holmes's patches of frameworks; its result is not
        # used.
        importlib.import_module("holmes_ext.patches").all_patches()
        # A rank that does not use holmes removes these modules from sys.modules, and its script may
        # then import holmes_ext anew. An extension that stayed would use the classes of the old
        # holmes_ext, so extensions are removed, too.
        packages = {point.module.partition(".")[0] for point in entry_points(group=GROUP)}
        packages.add("holmes_ext")
        _holmes_modules.update(
            name for name in set(sys.modules) - before if name.partition(".")[0] in packages
        )
        # The package module "holmes_ext" is not removed. The fork server has imported some of its
        # modules before, such as holmes_ext.errors. These stay, so their package must stay, too.
        _holmes_modules.discard("holmes_ext")
    gc.collect()
    # Otherwise the first full collection in a rank writes to all shared pages, and so copies them:
    # 0.1 s.
    gc.freeze()


def _forget_holmes() -> None:
    """Remove the preloaded modules of holmes and its extensions from sys.modules of this rank.

    For a rank that does not use holmes: it shall run as if holmes had never been imported.
    """
    for name in _holmes_modules:
        del sys.modules[name]
    # Packages have their modules as attributes. `from holmes_ext import job` would find the old
    # module there.
    for name in _holmes_modules:
        package, _, module = name.rpartition(".")
        if package in sys.modules:
            delattr(sys.modules[package], module)


def uses_emulated_gpu() -> bool:
    """Return whether this process uses an emulated GPU: it has the GPU's memory, or threads of streams."""
    threads = (
        Path(f"/proc/self/task/{thread}/comm").read_text()
        for thread in os.listdir("/proc/self/task")
    )
    return (
        "/memfd:emulated-gpu" in Path("/proc/self/maps").read_text() or "emulated-gpu\n" in threads
    )


def run_script(arguments: list[str], env: dict[str, str]) -> dict[str, Any]:
    """Run a script in this process, a rank that was forked from a fork server, as a new Python would.

    The script finds sys.argv, sys.path[0], the environment and random numbers as in a new Python. A
    fork has the random state of numpy of its parent, so numpy gets a new seed. The module `random`
    does this by itself after a fork, and torch begins with the same fixed seed in every process.

    Args:
        arguments: Words of the command after `python`: [SCRIPT, ...] or ["-m", MODULE, ...].
        env: The whole environment of the rank.

    Returns:
        The global variables of the script. The caller keeps them until the process ends, as Python does.
    """
    # Give gloo's threads time to release their last tensors: they need the interpreter for that.
    atexit.register(time.sleep, _RELEASE_S)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "numpy" in sys.modules:  # otherwise all ranks would have the random state of the fork server
        sys.modules["numpy"].random.seed()
    as_module = arguments[0] == "-m"
    sys.argv = arguments[1:] if as_module else list(arguments)
    if sys.path[:1] == [""]:  # python -c puts it there, unless PYTHONSAFEPATH is set
        sys.path[0] = os.getcwd() if as_module else str(Path(arguments[0]).resolve().parent)
    if trace.VARIABLE in env:  # a folder for traces: when this rank computes and communicates
        trace.install(env[trace.VARIABLE])
    if any(map(_pth.is_flag, sys.argv)) or env.get("HOLMES") == "1":
        from holmes_ext.job import activate

        activate(sys.argv)
    else:
        _forget_holmes()  # the preloaded modules of holmes; this job does not use holmes
    if env.get(SKIP_TEARDOWN) == "1":  # do not destroy all modules at the end: that takes 0.3 s
        _run_without_teardown(arguments, as_module)
    return _run(arguments, as_module)


def _run(arguments: list[str], as_module: bool) -> dict[str, Any]:
    if as_module:
        return runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    return runpy.run_path(arguments[0], run_name="__main__")


def _run_without_teardown(arguments: list[str], as_module: bool) -> NoReturn:
    """Run a script and end the process as the interpreter does, but without destroying modules."""
    status = 0
    try:
        variables = _run(arguments, as_module)  # noqa: F841 - they live until the process ends
    except SystemExit as end:
        if isinstance(end.code, int):
            status = end.code
        elif end.code is not None:
            print(end.code, file=sys.stderr)
            status = 1
    except KeyboardInterrupt:
        raise  # the interpreter then ends by SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status & 0xFF)
