"""Imported by Python at start-up where the emulated accelerator is on; it chains to the sitecustomize it hides."""

import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
_root = os.path.dirname(os.path.dirname(os.path.dirname(_here)))


def _chain() -> None:
    """Run the sitecustomize that would have been found without us."""
    path = [entry for entry in sys.path if os.path.abspath(entry) != _here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _install() -> None:
    saved = list(sys.path)
    sys.path.append(_root)
    try:
        from holmes_ext.lab.emulate.accelerator import install_when_imported
        from holmes_ext.lab.emulate.trace import install as install_trace
    except ImportError as error:
        sys.exit(f"holmes lab: the emulated accelerator cannot be installed in {sys.executable}: {error}")
    finally:
        sys.path[:] = saved
    install_when_imported(os.environ["HOLMES_LAB_ACCELERATOR"])
    if "HOLMES_LAB_TRACE" in os.environ:
        install_trace(os.environ["HOLMES_LAB_TRACE"])


if "HOLMES_LAB_ACCELERATOR" in os.environ:
    _install()
_chain()
