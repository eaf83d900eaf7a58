"""Runs the script that its arguments name; on node NODE_THAT_DIES the process kills itself in the last
backward of its 15th step.
"""

import os
import runpy
import signal
import sys

from holmes_ext.runtime.reduce.reducer import GradientReducer

arm, armed = GradientReducer.arm, []


def arm_or_die(reducer):
    armed.append(True)
    if os.environ["HOLMES_LAB_NODE"] == os.environ["NODE_THAT_DIES"] and len(armed) == 15:
        os.kill(os.getpid(), signal.SIGKILL)
    arm(reducer)


GradientReducer.arm = arm_or_die
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
