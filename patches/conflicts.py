"""Finds installed versions of two packages that do not work together, with or without holmes.

Two sources are read: a list of combinations that failed when they were run, and the requirements that the
packages' own metadata states.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from typing import NamedTuple

from packaging.requirements import InvalidRequirement, Requirement

from holmes_ext.patches.engine.patch import installed_version


class Conflict(NamedTuple):
    """Two installed packages whose versions do not work together."""

    packages: str  # e.g. "deepspeed 0.14.3 with torch 2.4.0"
    effect: str  # the failure, in words
    remedy: str  # a pip command for versions that work together


class FailingCombination(NamedTuple):
    """Version ranges of two packages that failed together when they were run.

    For example, deepspeed<0.14.4 failed with torch>=2.4. If the installed version of each package
    lies in its range, conflicts() reports the two versions.
    """

    first: Requirement
    second: Requirement
    effect: str  # the failure, in words
    remedy: str  # a pip command for versions that work together


FAILING_COMBINATIONS = (
    FailingCombination(
        first=Requirement("deepspeed<0.14.4"),
        second=Requirement("torch>=2.4"),
        effect="`import deepspeed` ends with ImportError: it needs what torch 2.4 took out of "
        "torch.distributed.elastic",
        remedy="pip install 'deepspeed>=0.14.4'",
    ),
    FailingCombination(
        first=Requirement("deepspeed>=0.18.9,<0.19"),
        second=Requirement("torch>=2.13"),
        effect="ZeRO 1 and 2 end in their first step with RuntimeError (Output 0 of Split is a view and is "
        "being modified inplace), found on CPUs; without ZeRO it trains",
        remedy="pip install 'deepspeed<0.18.9' or 'deepspeed>=0.19'",
    ),
)
#: Packages that holmes patches, whose stated requirements are compared with the installed versions.
PACKAGES_WITH_REQUIREMENTS = ("deepspeed", "megatron-core")


def conflicts(
    version_of: Callable[[str], str | None] = installed_version,
) -> Iterator[Conflict]:
    """Yield each pair of installed packages whose versions do not work together.

    Args:
        version_of: Returns the installed version of a package, None if it is not installed.
    """
    for combination in FAILING_COMBINATIONS:
        first_version = version_of(combination.first.name)
        second_version = version_of(combination.second.name)
        has_first = _is_satisfied(combination.first, first_version)
        has_second = _is_satisfied(combination.second, second_version)
        if has_first and has_second:
            yield Conflict(
                packages=f"{combination.first.name} {first_version} with "
                f"{combination.second.name} {second_version}",
                effect=combination.effect,
                remedy=combination.remedy,
            )

    for package in PACKAGES_WITH_REQUIREMENTS:
        package_version = version_of(package)
        if not package_version:
            continue
        for requirement in _stated_requirements(package):
            version = version_of(requirement.name)
            has_range = bool(requirement.specifier)  # "torch" alone accepts every version
            if version is None or not has_range or _is_satisfied(requirement, version):
                continue
            yield Conflict(
                packages=f"{package} {package_version} with {requirement.name} {version}",
                effect=f"{package} requires {requirement}",
                remedy=f"pip install '{requirement}', or another {package}",
            )


def _is_satisfied(requirement: Requirement, version: str | None) -> bool:
    """Return whether a version lies in the range that a requirement states."""
    if version is None:  # the package is not installed
        return False
    return requirement.specifier.contains(version, prereleases=True)


def _stated_requirements(package: str) -> Iterator[Requirement]:
    """Yield the requirements of an installed package that apply to this Python and platform.

    They are read from the package's metadata. Requirements of optional extras, and entries that cannot be
    parsed, are left out.
    """
    for text in importlib.metadata.requires(package) or []:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        marker = requirement.marker  # a condition such as python_version < "3.11"
        if marker is None or marker.evaluate({"extra": ""}):
            yield requirement
