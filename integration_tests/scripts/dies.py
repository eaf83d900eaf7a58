"""Runs a training script in which one process kills itself.

    dies.py SCRIPT ARGS

The process on node NODE_THAT_DIES kills itself in the last backward pass of its 15th step.
"""

import os
import runpy
import signal
import sys

from holmes_ext.runtime.reduce.reducer import GradientReducer

original_arm = GradientReducer.arm
steps = 0  # that have armed the reducer, which is done before the last backward pass


def arm_or_die(reducer):
    global steps
    steps += 1
    if os.environ["HOLMES_LAB_NODE"] == os.environ["NODE_THAT_DIES"] and steps == 15:
        os.kill(os.getpid(), signal.SIGKILL)
    original_arm(reducer)


GradientReducer.arm = arm_or_die
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
