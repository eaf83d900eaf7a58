"""Installation of emulated GPUs and accelerators in each Python of a job.

Python imports the module named `sitecustomize` when it starts. The lab puts the folder of this file
first into PYTHONPATH of jobs with emulated hardware, so that Python finds this one. The user's
environment may have a sitecustomize of its own. Python then does not find it, so this module runs
it at its end.
"""

import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))

_path = list(sys.path)
# The folder of holmes_lab, and the one above it: in a clone holmes_ext lies there, beside lab/.
sys.path += [os.path.abspath(os.path.join(_here, *[os.pardir] * count)) for count in (2, 3)]
try:
    if "HOLMES_GPU_OPERATORS" in os.environ:
        from holmes_lab.gpu import operators

        operators.install_when_imported(os.environ["HOLMES_GPU_OPERATORS"])
    if "HOLMES_LAB_ACCELERATOR" in os.environ:
        from holmes_lab.emulate import accelerator, trace

        accelerator.install_when_imported(os.environ["HOLMES_LAB_ACCELERATOR"])
        if "HOLMES_LAB_TRACE" in os.environ:
            trace.install(os.environ["HOLMES_LAB_TRACE"])
except ImportError as error:
    sys.exit(
        f"holmes lab: the emulated accelerator cannot be installed in {sys.executable}: {error}"
    )
finally:
    sys.path[:] = _path

# Run the sitecustomize that Python would have found without this folder.
_spec = importlib.machinery.PathFinder.find_spec(
    "sitecustomize", [entry for entry in sys.path if os.path.abspath(entry) != _here]
)
if _spec is not None and _spec.loader is not None:
    sys.modules["sitecustomize"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["sitecustomize"])
