"""Patches of the frameworks: the only code that knows their insides.

    engine/                         patches as values, the registry, where a patch lands
    torch/ deepspeed/ megatron/     the patches of each framework, in its modules' PATCHES; they import the framework only inside them
"""

import functools
import importlib

from holmes_ext.patches.engine.patch import Patch, PatchStatus
from holmes_ext.patches.engine.registry import Registry, disabled_features

__all__ = ["Patch", "PatchStatus", "Registry", "all_patches", "disabled_features", "installed_versions", "registry"]

_MODULES = (
    "torch.groups",
    "torch.telemetry",
    "deepspeed.p2p",
    "deepspeed.reduce",
    "deepspeed.two_level",
    "deepspeed.gather",
    "deepspeed.partition",
    "deepspeed.checkpoints",
    "deepspeed.profile",
    "megatron.megatron_deepspeed",
    "megatron.core",
    "megatron.reduction",
    "megatron.gather",
    "megatron.p2p",
    "megatron.profile",
    "megatron.megatron_lm",
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
