"""What holmes patches in megatron-core, Megatron-LM and Megatron-DeepSpeed, and which of them is loaded.

megatron-core is installed, or run from a source tree such as Megatron-LM's, under any path; Megatron-DeepSpeed brings a
megatron.core of its own (0.2) beside or over an installed one.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path

from holmes_ext.patches.engine.patch import Feature


def loaded_version() -> str | None:
    """The version of the megatron.core that the program imports, from its package_info (megatron.core is not whole
    yet).

    None when it is the copy that Megatron-DeepSpeed brings: its pipeline is DeepSpeed's, and there is nothing in it to
    patch.
    """
    version = importlib.import_module("megatron.core.package_info").__version__
    return None if version.startswith("0.2.") and _is_megatron_deepspeed() else version


def _is_megatron_deepspeed() -> bool:
    """By the file beside megatron/core that Megatron-LM has moved, and that reads deepspeed's arguments here; nothing
    is imported."""
    beside = Path(sys.modules["megatron.core"].__path__[0]).parent / "arguments.py"
    return beside.is_file() and "add_config_arguments" in beside.read_text(errors="replace")


def megatron_deepspeed_version() -> str | None:
    """The version of the vendored megatron.core; None when the megatron that was imported is not
    Megatron-DeepSpeed's."""
    if not hasattr(sys.modules.get("megatron.arguments"), "deepspeed"):
        return None
    return importlib.import_module("megatron.core.package_info").__version__


#: megatron-core of PyPI from 0.14 on, and what Megatron-LM's main branch calls 0.20.
_RANGE, _TRIED = ">=0.14,<0.21", ("0.14.0", "0.15.0", "0.16.1", "0.20.0")
_core = partial(Feature, versions=f"megatron-core{_RANGE}", tried=_TRIED, version_of=loaded_version)
#: Megatron-LM is run from its checkout: megatron-core, which is also installed alone, has no megatron.training.
_lm = partial(Feature, versions=f"megatron-lm{_RANGE}", tried=("0.16.1", "0.20.0"), version_of=loaded_version)

GROUPS = _core("megatron-groups")
LAYERS = _core("megatron-layers")
REDUCTION = _core("megatron-reduction")
GATHER = _core("megatron-gather", option="overlap", idle=("off", "auto"))
P2P = _core("megatron-p2p")
PROFILE = _core("megatron-profile", option="profile", idle=("",))
JOINED = _core("joined-megatron", option="join", idle=("",), binding=True)
TELEMETRY = _core("telemetry-megatron")
LM = _lm("megatron-lm")
LM_CHECKPOINTS = _lm("megatron-lm-checkpoints")
MEGATRON_DEEPSPEED_FLAGS = Feature(
    "megatron-deepspeed-flags", "megatron-deepspeed==0.2.*", ("0.2.0",), version_of=megatron_deepspeed_version
)
