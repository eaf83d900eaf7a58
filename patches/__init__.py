"""Patches: changes that holmes makes to torch, DeepSpeed, Megatron and Lightning while a job runs.

No other package of holmes depends on the internals of a framework.

    engine/                     describes patches, applies them and removes them
    FRAMEWORK/features.py       lists the features of one framework: groups of patches that are applied
                                together, with the versions and options they are for
    FRAMEWORK/*.py              each module has a tuple PATCHES with the patches of some features

When a job starts, it reads only the lists in features.py. It imports a module with PATCHES when the program
imports the framework that the patches change. Such a module imports the framework inside functions only.
"""

import functools
import sys
from collections.abc import Iterable, Mapping

from holmes_ext import extensions
from holmes_ext.options import Options
from holmes_ext.patches.deepspeed import features as deepspeed
from holmes_ext.patches.engine.patch import Feature, Patch, PatchModule
from holmes_ext.patches.engine.registry import Registry, disabled_features
from holmes_ext.patches.lightning import features as lightning
from holmes_ext.patches.megatron import features as megatron
from holmes_ext.patches.torch import features as torch

__all__ = [
    "WITH_GIL",
    "Feature",
    "Patch",
    "PatchModule",
    "Registry",
    "all_patches",
    "core_features",
    "core_patches",
    "disabled_features",
    "extension_patches",
    "features",
    "installed_versions",
    "registry",
    "without_gil",
]

_FRAMEWORKS: Mapping[str, Mapping[str, tuple[Feature, ...]]] = {
    "torch": torch.MODULES,
    "deepspeed": deepspeed.MODULES,
    "lightning": lightning.MODULES,
    "megatron": megatron.MODULES,
}
#: Modules with patches, except for those of extensions. A job prints their features in this order.
MODULES = tuple(
    PatchModule(
        name=f"{__name__}.{framework}.{module}",
        features=module_features,
        package=torch.PACKAGES.get(module, framework) if framework == "torch" else framework,
    )
    for framework, modules in _FRAMEWORKS.items()
    for module, module_features in modules.items()
)

#: Advice for a user whose Python runs without the global interpreter lock.
WITH_GIL = "set PYTHON_GIL=1, or use a Python that has this lock"


def core_features() -> tuple[Feature, ...]:
    """Return the features of holmes itself, without those of extensions.

    No module with patches is imported.
    """
    feature_by_name: dict[str, Feature] = {}  # several modules may have patches of one feature
    for module in MODULES:
        for feature in module.features:
            feature_by_name[feature.name] = feature
    return tuple(feature_by_name.values())


def core_patches() -> tuple[Patch, ...]:
    """Import and return the patches of holmes itself, without those of extensions.

    No framework is imported.
    """
    return _patches_of(module.name for module in MODULES)


def extension_patches(options: Options | None = None) -> tuple[Patch, ...]:
    """Import and return the patches of extensions.

    Args:
        options: The job's options: only the extensions that they switch on are read. None for all extensions.
    """
    return _patches_of(extensions.patch_modules(options))


def _patches_of(module_names: Iterable[str]) -> tuple[Patch, ...]:
    patches: list[Patch] = []
    for name in module_names:
        patches += extensions.load(name).PATCHES
    return tuple(patches)


def all_patches() -> tuple[Patch, ...]:
    """Import and return every patch of holmes and its extensions. No framework is imported."""
    return (*core_patches(), *extension_patches())


def features() -> tuple[str, ...]:
    """Return the names of all features, also those of extensions."""
    return (*(feature.name for feature in core_features()), *extensions.features())


@functools.cache
def registry() -> Registry:
    """Return the registry of this process: it applies patches and removes them.

    It has the patches of holmes itself. job.py adds those of the extensions that the job uses.
    """
    return Registry(modules=MODULES, extension_features=extensions.features())


def installed_versions(features: Iterable[Feature]) -> dict[str, str]:
    """Return the installed versions of the frameworks that some features patch.

    Returns:
        A dict: name of a framework -> its version, sorted by name, without frameworks that are not installed.
    """
    version_by_name: dict[str, str] = {}
    for feature in features:
        version = feature.installed()
        if version:
            version_by_name[feature.requirement.name] = version
    return dict(sorted(version_by_name.items()))


def without_gil() -> str:
    """Return the reason why holmes refuses a job if this Python has no global interpreter lock; else "".

    The text is part of an error message: "this Python runs without the global interpreter lock".
    """
    is_gil_enabled = getattr(sys, "_is_gil_enabled", None)  # only Python 3.13 and newer have it
    if is_gil_enabled is None or is_gil_enabled():
        return ""
    return "this Python runs without the global interpreter lock"
