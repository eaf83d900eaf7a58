"""Ranks on emulated GPUs, forked from one Python that has imported torch: that takes seconds.

    python forked.py < [[SCRIPT, ARGUMENT, ...], [environment of rank 0, ...]]

In JSON, since an argument --holmes would be this process's own. A rank's output goes to the file of its
number in this directory; JSON of their exit statuses is printed.
"""

import json
import os
import sys

import torch  # noqa: F401
from holmes_lab.network import namespaces
from holmes_lab.process import zygote


def main():
    script, environments = json.load(sys.stdin)
    zygote.import_for_ranks()
    children = []
    for rank, environment in enumerate(environments):
        child = os.fork()
        if child == 0:
            namespaces.die_with_parent()
            with open(f"{rank}.log", "wb") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            return zygote.run_script(script, environment)
        children.append(child)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))


variables = main()  # a rank's, which live until its interpreter ends
