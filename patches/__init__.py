"""Patches of the frameworks: the only code that knows their insides.

    engine/                         patches as values, the registry, where a patch lands
    torch/ deepspeed/ megatron/ ... each framework's: features.py says what there is, for which versions and
                                    options; PATCHES of the modules do it. They import it only inside
"""

import functools
import importlib
from collections.abc import Iterable

from holmes_ext import extensions
from holmes_ext.options import Options
from holmes_ext.patches.engine.patch import Feature, Patch
from holmes_ext.patches.engine.registry import Registry, disabled_features

__all__ = [
    "Feature", "Patch", "Registry", "all_patches", "core_patches", "disabled_features", "extension_patches",
    "features", "installed_versions", "registry",
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


def core_patches() -> tuple[Patch, ...]:
    """Return the patches that every job may use. No framework is imported."""
    names = [f".{framework}.{module}" for framework, modules in _MODULES.items() for module in modules]
    return tuple(patch for name in names for patch in importlib.import_module(name, __name__).PATCHES)


def extension_patches(options: Options | None = None) -> tuple[Patch, ...]:
    """Return the patches of the extensions that a job with these options uses; without options, of all."""
    names = extensions.patch_modules(options)
    return tuple(patch for name in names for patch in importlib.import_module(name).PATCHES)


def all_patches() -> tuple[Patch, ...]:
    """Return every patch of holmes and its extensions. No framework is imported."""
    return (*core_patches(), *extension_patches())


def features() -> tuple[str, ...]:
    """Return the names of all features, also those of extensions."""
    return (*dict.fromkeys(patch.feature.name for patch in core_patches()), *extensions.features())


@functools.cache
def registry() -> Registry:
    """Return the registry of this process, with every patch of the core in it.

    job.py adds the patches of the extensions that the job uses.
    """
    return Registry(core_patches(), elsewhere=extensions.features())


def installed_versions(patches: Iterable[Patch]) -> dict[str, str]:
    """Return the version of each framework that patches change and that is installed, by name in order."""
    versions = {patch.feature.requirement.name: patch.feature.installed() for patch in patches}
    return {name: version for name, version in sorted(versions.items()) if version}
