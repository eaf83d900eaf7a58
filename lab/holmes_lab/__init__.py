"""Emulation of heterogeneous clusters on one machine, the "lab".

Nodes are network namespaces, which are connected by links with limited rates. NICs and accelerators are
emulated.

    from holmes_lab import Lab
    with Lab(load_spec("cluster.toml"), scale=1.0) as lab:
        result = lab.run(["python", "train.py"], preload=("torch",))

            Lab (caller) --control--> keeper --forks--> holders: a0, a1, b0, ... and the switch
              |                         |  --forks--> launcher --forks--> ranks of one job (exec)
              |                         `--execs--> zygote (preloaded) --forks--> launcher --> ranks
              `---- one socket and the ranks' pipes for each job ----'

A holder is a process that keeps the namespaces of a node alive. A zygote is a Python that has imported the
modules of a job, from which ranks are forked.

All holders, zygotes and ranks are in one PID namespace, whose init dies with the keeper. The keeper ends when
the caller ends. So the kernel frees everything, however the lab ends. Nothing in a lab can be seen by name
outside of it. Labs of one process can share preloaded Pythons (process/templates.py).
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
    """Return a public name, and import its module only now.

    The keeper and the ranks import this package, but need only a few small modules of it.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
