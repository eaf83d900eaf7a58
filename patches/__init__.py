"""Patches of the frameworks: the only code that knows their insides.

    patch.py     Patch: a change as a value                 source.py  does it fit a module not imported yet?
    registry.py  Registry: applies, undoes, reports         site.py    one patched attribute and its copies

Each other module holds the patches of one framework in PATCHES, and imports the framework only inside them.
"""

import functools
import importlib

from .patch import Patch, PatchStatus
from .registry import Registry, disabled_features

__all__ = ["Patch", "PatchStatus", "Registry", "all_patches", "disabled_features", "installed_versions", "registry"]

_MODULES = (
    "torch_distributed",
    "telemetry",
    "deepspeed_pipe",
    "deepspeed_reduce",
    "deepspeed_two_level",
    "deepspeed_gather",
    "deepspeed_partition",
    "deepspeed_checkpoints",
    "deepspeed_profile",
    "megatron_deepspeed",
    "megatron_core",
    "megatron_reduction",
    "megatron_gather",
    "megatron_p2p",
    "megatron_profile",
    "megatron_lm",
)


def all_patches() -> tuple[Patch, ...]:
    """Every patch that holmes knows. No framework is imported."""
    return tuple(patch for name in _MODULES for patch in importlib.import_module(f".{name}", __name__).PATCHES)


@functools.cache
def registry() -> Registry:
    """The registry of this process, with every patch in it and none applied."""
    return Registry(all_patches())


def installed_versions() -> dict[str, str]:
    """Version of every patched framework that is installed, by name in order: must be the same on all ranks."""
    versions = {patch.requirement.name: patch.installed() for patch in all_patches()}
    return {name: version for name, version in sorted(versions.items()) if version}
