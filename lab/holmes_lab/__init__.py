"""A heterogeneous cluster on one machine: network namespaces, shaped links, emulated NICs and accelerators.

    from holmes_lab import Lab
    with Lab(load_spec("cluster.toml"), scale=1.0) as lab:
        result = lab.run(["python", "train.py"], preload=("torch",))

            Lab (caller) --control--> keeper --forks--> holders: a0, a1, b0, ... and the switch
              |                         |  --forks--> launcher --forks--> ranks of one job (exec)
              |                         `--execs--> zygote (preloaded) --forks--> launcher --> ranks
              `---- one socket and the ranks' pipes for each job ----'

The holders, the zygotes and every rank live in one PID namespace whose init dies with the keeper; the keeper
ends when the caller does. So the kernel frees everything, however the lab ends. Nothing here has a name
outside the lab. Labs of one process can share preloaded Pythons (process/templates.py).
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
    """Load a public name when it is asked for: the keeper and the ranks need only a few small modules."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
