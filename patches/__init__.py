"""Patches of the frameworks: the only code that knows their insides.

    engine/                         patches as values, the registry, where a patch lands
    torch/ deepspeed/ megatron/ ... each framework's: features.py says what there is, for which versions and
                                    options; PATCHES of the modules do it. They import it only inside

A job knows all features from features.py. It imports the modules with PATCHES when the program imports what
they change.
"""

import functools
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
]

_FRAMEWORKS: Mapping[str, Mapping[str, tuple[Feature, ...]]] = {
    "torch": torch.MODULES,
    "deepspeed": deepspeed.MODULES,
    "lightning": lightning.MODULES,
    "megatron": megatron.MODULES,
}
#: The modules with the patches of the core. A job lists their features in this order when it starts.
MODULES = tuple(
    PatchModule(
        name=f"{__name__}.{framework}.{module}",
        features=module_features,
        package=torch.PACKAGES.get(module, framework) if framework == "torch" else framework,
    )
    for framework, modules in _FRAMEWORKS.items()
    for module, module_features in modules.items()
)


def core_features() -> tuple[Feature, ...]:
    """Return the features that every job may use. No module with patches is imported."""
    by_name = {feature.name: feature for module in MODULES for feature in module.features}
    return tuple(by_name.values())


def core_patches() -> tuple[Patch, ...]:
    """Import and return the patches that every job may use. No framework is imported."""
    return _patches_of(module.name for module in MODULES)


def extension_patches(options: Options | None = None) -> tuple[Patch, ...]:
    """Return the patches of the extensions that a job with these options uses; without options, of all."""
    return _patches_of(extensions.patch_modules(options))


def _patches_of(modules: Iterable[str]) -> tuple[Patch, ...]:
    return tuple(patch for module in modules for patch in extensions.load(module).PATCHES)


def all_patches() -> tuple[Patch, ...]:
    """Return every patch of holmes and its extensions. No framework is imported."""
    return (*core_patches(), *extension_patches())


def features() -> tuple[str, ...]:
    """Return the names of all features, also those of extensions."""
    return (*(feature.name for feature in core_features()), *extensions.features())


@functools.cache
def registry() -> Registry:
    """Return the registry of this process, with every feature of the core in it.

    job.py adds the patches of the extensions that the job uses.
    """
    return Registry(modules=MODULES, elsewhere=extensions.features())


def installed_versions(features: Iterable[Feature]) -> dict[str, str]:
    """Return the version of each framework of some features that is installed, by name in order."""
    versions = {feature.requirement.name: feature.installed() for feature in features}
    return {name: version for name, version in sorted(versions.items()) if version}
