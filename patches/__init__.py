"""Patches of the frameworks: the only code that knows their insides.

    engine/                         patches as values, the registry, where a patch lands
    torch/ deepspeed/ megatron/ ... each framework's: features.py says what there is, for which versions and
                                    options; PATCHES of the modules do it. They import it only inside
"""

import functools
import importlib

from holmes_ext.patches.engine.patch import Feature, Patch
from holmes_ext.patches.engine.registry import Registry, disabled_features

__all__ = [
    "Feature", "Patch", "Registry", "all_patches", "disabled_features", "installed_versions", "registry",
]  # fmt: skip

_MODULES = {
    "torch": (
        "groups", "messages", "late_start", "shrink", "torchcomms", "ddp", "fsdp", "passes", "pipelining",
        "telemetry", "failures",
    ),
    "deepspeed": (
        "p2p", "edges", "reduce", "two_level", "partition", "checkpoints", "profile", "telemetry",
    ),
    "lightning": ("ranks",),
    "megatron": (
        "unused", "core", "reduce.reduction", "reduce.gather", "reduce.tied", "p2p", "edges", "experts",
        "profile", "flags", "megatron_lm", "telemetry",
    ),
}  # fmt: skip


def all_patches() -> tuple[Patch, ...]:
    """Every patch that holmes knows. No framework is imported."""
    names = [f".{framework}.{module}" for framework, modules in _MODULES.items() for module in modules]
    joined = ("torch", "deepspeed", "transformers", "megatron")
    names += [f"holmes_ext.join.patches.{name}" for name in joined]
    return tuple(patch for name in names for patch in importlib.import_module(name, __name__).PATCHES)


def features() -> tuple[str, ...]:
    """Names of all features."""
    return tuple(dict.fromkeys(patch.feature.name for patch in all_patches()))


@functools.cache
def registry() -> Registry:
    """The registry of this process, with every patch in it and none applied."""
    return Registry(all_patches())


def installed_versions() -> dict[str, str]:
    """Version of each patched framework that is installed, by name in order: the same on all ranks."""
    versions = {patch.feature.requirement.name: patch.feature.installed() for patch in all_patches()}
    return {name: version for name, version in sorted(versions.items()) if version}
