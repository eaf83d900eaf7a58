"""Activates holmes in an unmodified script, by the one-line file holmes_ext.pth.

Python's `site` runs the line of the .pth file in every interpreter of the environment. The line imports this
module only if the arguments have `--holmes` or a flag `--holmes-...`, or if HOLMES is 1 (ignored by
`python -I` and `-E`). Then:

    1  arm()       installs an audit hook
    2  _on_event() runs right before the main program starts: sys.path is complete, and the interpreter
                   reports the program by an audit event such as "cpython.run_file"
    3  decide()    chooses an action for the program
    4  start()     activates holmes by holmes_ext.job.activate

Actions of decide():

    program                                         --holmes       HOLMES=1 only
    a launcher (torchrun, deepspeed, accelerate,    leave          leave
      holmes, pip, ...), a helper process of
      multiprocessing, a child of a worker
    any other, if HOLMES=0 or HOLMES_DISABLE=all    strip          leave
    a worker (its environment has a rank):
      FILE.py or -m MODULE                          activate       activate
      -c CODE, standard input                       activate       leave
    without a rank:
      FILE.py or -m MODULE                          activate       activate
      FILE.py or -m MODULE in a Slurm batch step    activate       leave
      -c CODE, standard input                       activate       leave
      another installed command (no suffix .py)     leave          leave

    activate   start holmes
    strip      remove the flags of holmes, so that the program runs without holmes
    leave      change nothing: an unknown launcher needs the flags for its workers

A worker sets HOLMES_WORKER_PID to its process id. Processes that have this worker as an ancestor (data-loader
workers, checkpoint writers, compilers) are left unchanged. As a consequence, a torchrun that is started
inside a worker runs without holmes. A process that replaces itself by exec keeps its id and is activated
again.

This module imports only os and sys, which every interpreter has loaded already.
"""

import os
import sys

TYPE_CHECKING = False  # as typing.TYPE_CHECKING, without the import
if TYPE_CHECKING:
    from collections.abc import Mapping

#: Environment variable with the process id of the worker.
MARKER = "HOLMES_WORKER_PID"

# Modules (run by -m) and installed commands that start other programs, or are never training scripts.
_LAUNCHER_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "deepspeed",
    "accelerate",
    "holmes_ext",
    "pip",
    "pytest",
    "venv",
    "ensurepip",
)
_LAUNCHER_COMMANDS = (
    "torchrun",
    "deepspeed",
    "deepspeed.pt",
    "ds",
    "accelerate",
    "accelerate-launch",
    "holmes",
    "pip",
    "pip3",
    "pytest",
    "py.test",
)
# The same launchers, run as files of an installed package.
_LAUNCHER_FILES = (
    "torch/distributed/run.py",
    "torch/distributed/launch.py",
    "deepspeed/launcher/runner.py",
    "deepspeed/launcher/launch.py",
    "accelerate/commands/launch.py",
)

#: Audit event -> how the program is run.
_EVENTS = {
    "cpython.run_file": "file",
    "cpython.run_module": "module",
    "cpython.run_command": "command",
    "cpython.run_stdin": "stdin",
}

#: Flags of holmes that take a value only after "=". This module imports nothing, so it repeats their names.
FLAGS_WITHOUT_VALUE = ("--holmes-check",)

_started = False


def arm() -> None:
    """Install an audit hook that runs _on_event() when the main program is about to start.

    holmes_ext.pth calls this function. The hook costs 50 ns for each audit event.
    """
    sys.addaudithook(_on_event)


def _on_event(event: str, args: tuple[object, ...]) -> None:
    """Start holmes, or remove its flags from sys.argv, when the main program is about to start.

    This is an audit hook: Python calls it for every audit event. It acts only on events such as
    "cpython.run_file", by which Python announces the main program. Holmes starts in a worker of a
    training job that has a flag --holmes... or HOLMES=1. With HOLMES=0, only the flags are removed.
    Nothing is done in launchers. decide() has the rules.

    Args:
        event: Name of Python's audit event, such as "cpython.run_file".
        args: Arguments of the event: the path, module or code that is run.
    """
    kind = _EVENTS.get(event)
    if kind is None:  # not the start of a program
        return
    program = str(args[0]) if args else ""
    child = is_child(os.environ)  # descends from a worker in which holmes was started
    action = decide(kind, program, sys.argv[1:], os.environ, child)
    if action == "activate":
        start(sys.argv)
    elif action == "strip":
        strip_flags(sys.argv)


def decide(
    kind: str, program: str, arguments: list[str], environ: "Mapping[str, str]", child: bool
) -> str:
    """Return whether holmes starts in this program, or only its flags are removed.

    Called only if the command line has a flag of holmes or the environment has HOLMES=1.

    - "activate": start holmes. For a program with a rank (a worker), or with flags --holmes...
    - "strip": remove the flags, because HOLMES=0 or HOLMES_DISABLE=all switches holmes off.
    - "leave": change nothing. For launchers, processes of multiprocessing, and children of a
      worker.

    The module's docstring has the complete table.

    Args:
        kind: How the program is run: "file", "module", "command" (-c CODE) or "stdin".
        program: Path of the file, name of the module, or the code.
        arguments: Arguments of the program.
        environ: Environment variables.
        child: Whether an ancestor of this process is a worker in which holmes was activated.
    """
    has_flags = any(is_flag(argument) for argument in arguments)
    is_multiprocessing = kind == "command" and program.startswith("from multiprocessing.")
    # A child of a worker, a launcher, or a helper process of multiprocessing trains nothing.
    if child or is_launcher(kind, program) or is_multiprocessing:
        return "leave"
    if is_off(environ):
        return "strip" if has_flags else "leave"
    if not has_flags and kind in ("command", "stdin"):
        return "leave"  # HOLMES=1 alone does not concern code without a file
    if is_worker(environ):
        return "activate"
    # From here on, no launcher has given this process a rank.
    is_unknown_command = kind == "file" and not program.endswith((".py", ".pyc"))
    if is_unknown_command:
        return "leave"  # it may be a launcher, whose workers need the flags
    # Slurm's batch script is no worker. It may run helper programs before srun starts the workers.
    # With HOLMES=1 alone, holmes stays out of these. A flag names the program explicitly.
    in_batch_step = "SLURM_PROCID" in environ
    return "activate" if has_flags or not in_batch_step else "leave"


def is_flag(argument: str) -> bool:
    """Return whether a command-line argument is a flag of holmes."""
    return argument == "--holmes" or argument.startswith(("--holmes-", "--holmes="))


def takes_value(argument: str) -> bool:
    """Return whether the value of a flag of holmes is the next argument, not part of the flag (=VALUE)."""
    is_option = argument.startswith("--holmes-") and argument not in FLAGS_WITHOUT_VALUE
    return is_option and "=" not in argument


def is_launcher(kind: str, program: str) -> bool:
    """Return whether a program starts workers, or is a tool such as pip, instead of being a worker."""
    if kind == "module":
        return any(program == name or program.startswith(name + ".") for name in _LAUNCHER_MODULES)
    if kind != "file":
        return False
    return os.path.basename(program) in _LAUNCHER_COMMANDS or program.endswith(_LAUNCHER_FILES)


def is_worker(environ: "Mapping[str, str]") -> bool:
    """Return whether a launcher gave this process a rank."""
    variables_of_launchers = (
        ("RANK", "WORLD_SIZE"),  # torchrun, deepspeed, accelerate
        ("SLURM_PROCID", "SLURM_STEP_ID"),  # srun; Slurm's batch script has no step id
        ("OMPI_COMM_WORLD_RANK",),  # mpirun of Open MPI
        ("PMI_RANK",),  # mpirun of MPICH
    )
    return any(all(name in environ for name in variables) for variables in variables_of_launchers)


def is_off(environ: "Mapping[str, str]") -> bool:
    """Return whether the environment switches holmes off: HOLMES=0, or "all" in HOLMES_DISABLE."""
    disabled = [name.strip() for name in environ.get("HOLMES_DISABLE", "").split(",")]
    return environ.get("HOLMES") == "0" or "all" in disabled


def is_child(environ: "Mapping[str, str]") -> bool:
    """Return whether this process descends from a worker in which holmes was started.

    Such a worker has put its process id into HOLMES_WORKER_PID, which its children inherit. The id
    is searched among the ancestors of this process in /proc. False if no ancestor has the id (the
    environment came over ssh), or if only this process itself has it (a worker after exec).
    """
    marker = environ.get(MARKER)  # process id of the worker
    ancestor = os.getppid() if marker else 0  # the search begins with the parent
    while ancestor:
        if str(ancestor) == marker:
            return True
        ancestor = _parent(ancestor)
    return False


def _parent(pid: int) -> int:
    """Return the id of a process's parent; 0 if it has none, or if the system hides the process."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            _, _, after_name = stat.read().rpartition(")")
            _state, parent, *_ = after_name.split()
            return int(parent)
    except OSError:
        return 0


def start(argv: list[str]) -> None:
    """Activate holmes in this process; further calls have no effect.

    Args:
        argv: Command line, from which the flags of holmes are removed, in place.

    Raises:
        SystemExit: the input is bad (status 2). A message was printed.
    """
    global _started
    if _started:
        return
    _started = True
    # A process with a rank puts its process id into HOLMES_WORKER_PID. Its children inherit the
    # variable, and is_child() recognizes them by it: holmes does not start in them again.
    if is_worker(os.environ):
        os.environ[MARKER] = str(os.getpid())
    # Imported only here: most interpreters do not start holmes.
    from holmes_ext.job import activate

    activate(argv)


def strip_flags(argv: list[str]) -> None:
    """Remove all flags of holmes and their values from a command line, in place, without checking them."""
    kept = []
    is_value = False  # whether the argument is the value of the flag before it
    for argument in argv:
        if is_value:
            is_value = False
        elif is_flag(argument):
            is_value = takes_value(argument)
        else:
            kept.append(argument)
    argv[:] = kept
