"""Switching on without touching the script: what the one-line holmes_ext.pth does.

Python's `site` runs the line in every interpreter of the environment. It imports nothing unless `--holmes`,
or a flag starting with `--holmes-`, is among the arguments or HOLMES is 1 (which `python -I` and `-E` do not
read); then arm() waits, by an audit hook, for the moment right before the main program starts: sys.path is
complete, and the interpreter says what it is about to run.

    site -> .pth line -> arm() ... "cpython.run_file" -> decide() -> start() -> holmes_ext.job.activate

decide() answers by what runs and how holmes was asked for:

    what runs                                       --holmes       HOLMES=1 alone
    a launcher (torchrun, deepspeed, accelerate,    leave          leave
      holmes, pip, ...), a helper process of
      multiprocessing, a child of a worker
    anything, when HOLMES=0 or HOLMES_DISABLE=all   strip          (leave)
    a worker: a rank in the environment             activate       activate a file or module
    one process, no rank: FILE.py or -m MODULE      activate       activate, not in a batch step
    one process, no rank: -c CODE, standard input   activate       leave
    one process, no rank: another installed         leave: a launcher we do not know needs its
      command (no .py suffix)                         flags for the workers that it starts

"leave" touches nothing; "strip" removes the flags, so that the same command runs stock.

A worker marks its environment (HOLMES_WORKER_PID = its process id), and a process that has that very process
as an ancestor (data-loader workers, checkpoint writers, compilers) is left alone. The price: a torchrun
started from inside a worker gets no holmes. A process that replaces itself with exec keeps its id and is
activated again.

Only os and sys are imported here; both are loaded in every interpreter already.
"""

import os
import sys

MARKER = "HOLMES_WORKER_PID"

# Modules (run by -m) and installed commands that start other programs, or are never a training script.
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

_EVENTS = {
    "cpython.run_file": "file",
    "cpython.run_module": "module",
    "cpython.run_command": "command",
    "cpython.run_stdin": "stdin",
}

_started = False


def arm():
    """Wait for the main program; called by holmes_ext.pth. Costs 50 ns an audit event."""
    sys.addaudithook(_on_event)


def _on_event(event, args):
    kind = _EVENTS.get(event)
    if kind is None:
        return
    action = decide(
        kind, str(args[0]) if args else "", sys.argv[1:], os.environ, is_child(os.environ)
    )
    if action == "activate":
        start(sys.argv)
    elif action == "strip":
        strip_flags(sys.argv)


def decide(kind, program, arguments, environ, child):
    """ "leave", "strip" or "activate" the program that is about to start (see the table above). kind: "file",
    "module", "command" or "stdin"; child: this process descends from a worker."""
    flagged = any(is_flag(argument) for argument in arguments)
    if (
        child
        or is_launcher(kind, program)
        or (kind == "command" and program.startswith("from multiprocessing."))
    ):
        return "leave"
    if is_off(environ):
        return "strip" if flagged else "leave"
    if not flagged and kind in ("command", "stdin"):
        return "leave"
    if is_worker(environ):
        return "activate"
    if kind == "file" and not program.endswith((".py", ".pyc")):
        return "leave"
    in_batch_step = (
        "SLURM_PROCID" in environ
    )  # no worker: a helper in a batch script, before its srun
    return "activate" if flagged or not in_batch_step else "leave"


def is_flag(argument):
    """Whether a command-line argument is one of holmes's flags."""
    return argument == "--holmes" or argument.startswith(("--holmes-", "--holmes="))


def takes_value(argument):
    """Whether the value of this flag of holmes's is the next argument."""
    return argument.startswith("--holmes-") and "=" not in argument


def is_launcher(kind, program):
    """Whether the program starts workers (or is a tool) instead of being a worker."""
    if kind == "module":
        return any(program == name or program.startswith(name + ".") for name in _LAUNCHER_MODULES)
    return kind == "file" and (
        os.path.basename(program) in _LAUNCHER_COMMANDS or program.endswith(_LAUNCHER_FILES)
    )


def is_worker(environ):
    """Whether a launcher gave this process a rank. (Slurm's batch script has no SLURM_STEP_ID.)"""
    pairs = (
        ("RANK", "WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_STEP_ID"),
        ("OMPI_COMM_WORLD_RANK",),
        ("PMI_RANK",),
    )
    return any(all(name in environ for name in pair) for pair in pairs)


def is_off(environ):
    """Whether the environment switches all of holmes off: HOLMES=0, or "all" in HOLMES_DISABLE."""
    disabled = [name.strip() for name in environ.get("HOLMES_DISABLE", "").split(",")]
    return environ.get("HOLMES") == "0" or "all" in disabled


def is_child(environ):
    """Whether this process descends from an activated worker (by /proc). A marker that names this process
    (after exec), or no ancestor (it came over ssh), does not count."""
    marker = environ.get(MARKER)
    ancestor = os.getppid() if marker else 0
    while ancestor:
        if str(ancestor) == marker:
            return True
        ancestor = _parent(ancestor)
    return False


def _parent(pid):
    """The parent of process pid; 0 at the top, or where the system hides the process."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def start(argv):
    """Activate holmes in this process, once; holmes_ext.job.activate takes its flags out of argv.
    SystemExit(2) after it has printed what is wrong."""
    global _started
    if _started:
        return
    _started = True
    if is_worker(os.environ):
        os.environ[MARKER] = str(os.getpid())
    from holmes_ext.job import activate  # the .pth line must import nothing before

    activate(argv)


def strip_flags(argv):
    """Remove `--holmes` and `--holmes-NAME VALUE` (or =VALUE) from argv, in place, unread."""
    kept, skip = [], False
    for argument in argv:
        if skip:
            skip = False
        elif is_flag(argument):
            skip = takes_value(argument)
        else:
            kept.append(argument)
    argv[:] = kept
