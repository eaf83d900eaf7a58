"""Forks ranks on emulated GPUs from one Python that has imported torch, since the import takes seconds.

    python forked.py < [[SCRIPT, ARGUMENT, ...], [environment of rank 0, ...]]

The input is JSON, since a flag --holmes would belong to this process. The output of a rank goes into the
file RANK.log in this directory, and the exit statuses are printed as JSON.
"""

import json
import os
import sys

import torch  # noqa: F401
from holmes_lab.network import namespaces
from holmes_lab.process import fork_server


def main():
    """Fork the ranks and print their exit statuses.

    Returns:
        In a rank, the variables of its script. In the parent process, None.
    """
    script, environments = json.load(sys.stdin)
    fork_server.import_for_ranks()
    children = []
    for rank, environment in enumerate(environments):
        child = os.fork()
        if child == 0:
            namespaces.die_with_parent()
            with open(f"{rank}.log", "wb") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            return fork_server.run_script(script, environment)
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(json.dumps(statuses))
    return None


variables = main()  # keeps the variables of a rank alive until its interpreter ends
