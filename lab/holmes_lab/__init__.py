"""Emulation of heterogeneous clusters on one machine, the "lab".

Nodes are network namespaces, connected by links with limited rates. NICs and accelerators are
emulated.

    from holmes_lab import Lab
    with Lab(load_spec("cluster.toml"), scale=1.0) as lab:
        result = lab.run(["python", "train.py"], preload=("torch",))

            Lab (caller) --socket--> keeper --> namespace holders: a0, a1, b0, ... and the switch
              |                         |  ---> job supervisor --> ranks of one job
              |                         `-----> fork server --> job supervisor --> ranks of one job
              `--- for each job: a socket to its supervisor, and the pipes of its ranks ---'

    keeper              owns all other processes of the lab, and ends when the caller ends
    namespace holder    sleeps, and so keeps the namespaces of a node alive
    job supervisor      forks the ranks of one job, and reports their ends
    fork server         a Python that has imported the modules of a job, so that ranks need not import them

All of these but the keeper are in one PID namespace. The kernel ends it when the keeper ends, so
that no process and no device remains, however the lab ends. Programs outside of the lab cannot
reach its network interfaces, abstract sockets or /dev/shm files by name. Labs of one process can
share preloaded Pythons (process/templates.py).
"""

import importlib

_HOMES = {
    "Job": "process.job",
    "RunResult": "process.job",
    "Lab": "lab",
    "interleave": "process.ranks",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    """Return a public name of this package, after importing the module that defines it.

    The keeper (the process that owns a lab) and the ranks import this package, but need only a few
    small modules of it.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
