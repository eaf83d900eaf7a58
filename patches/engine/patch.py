"""Describes the changes that holmes makes to a framework (torch, DeepSpeed, ...) at run time.

    Patch      one change to one attribute of a module or class, e.g. a wrapper around a function
    Feature    a group of patches that are applied together, for a range of the framework's versions

`FeatureState` records which patches of a feature are applied in this process, or why the feature is off.

The registry (registry.py) applies patches when their modules are imported.
"""

import functools
import importlib.metadata
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from holmes_ext.options import Options, choices_of, flag

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@functools.cache
def installed_version(distribution: str) -> str | None:
    """Return the version of a package, or None if it is not installed.

    The version is read from the package's metadata, so the package is not imported.
    """
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


#: Stands for a version that does not name a release. The number is so large that every comparison
#: takes it for newer than all releases.
UNKNOWN = Version("9999")
#: Version tools call a git checkout without tags 0 or 0.1.dev1, for example. Versions up to 0.1
#: therefore count as no release. Releases as old as that are not supported anyway.
_HIGHEST_UNTAGGED = Version("0.1")


@functools.cache
def release_of(version: str) -> Version:
    """Return the release that a version of a package belongs to.

    For example 2.7.0 for 2.7.0a0+79aa17489c.nv25.4. UNKNOWN is returned for a version that names no
    release: if it is malformed, or at most 0.1. Version tools give such low numbers to a git
    checkout without tags, e.g. 0+unknown or 0.1.dev1+g1234567.
    """
    try:
        release = Version(Version(version).base_version)
    except InvalidVersion:
        return UNKNOWN
    if release <= _HIGHEST_UNTAGGED:  # 0.1: of a git checkout without tags, not of a release
        return UNKNOWN
    return release


@dataclass(frozen=True)
class Feature:
    """Group of patches (changes to a framework) that are all applied, or not at all."""

    name: str  # as HOLMES_DISABLE and --holmes-require take it
    versions: str  # package and PEP 440 range, as in "deepspeed>=0.19,<0.20"
    #: Versions that the feature was run with, at least the oldest and the newest of the range.
    tried: tuple[str, ...] = ()
    option: str = ""  # name of the option that switches the feature on; "" if every job uses it
    idle: tuple[str, ...] = ()  # values of `option` that leave the feature off

    #: Returns the version of the imported framework, if its package has no metadata: it is vendored, or runs
    #: from a source tree. None if the imported module belongs to another framework: the feature is then off
    #: without a warning.
    version_of: Callable[[], str | None] | None = None

    read: tuple[str, ...] = ()  # versions whose source was compared only, without a run
    #: Whether the job ends if the feature is on, its framework is imported and a patch does not
    #: fit. Other features are then switched off, and the job goes on without them.
    binding: bool = False
    what: str = ""  # its benefit for the user, in a few words
    #: Function of holmes_ext that switches the feature on when a program imports it, instead of an option.
    enabling_function: str = ""

    def __post_init__(self) -> None:
        # Raises InvalidRequirement, a ValueError, if the range is malformed.
        Requirement(self.versions)

    @cached_property
    def requirement(self) -> Requirement:
        """Package and range of the field `versions`, parsed."""
        return Requirement(self.versions)

    def installed(self) -> str | None:
        """Return the version of the framework's package; None if it is not installed."""
        return installed_version(self.requirement.name)

    def is_enabled_by(self, options: Options) -> bool:
        """Return whether a job with these options uses the feature.

        False if a function of holmes_ext switches the feature on, instead of an option.
        """
        if self.enabling_function:
            return False
        if not self.option:
            return True  # every job uses the feature
        return options.value(self.option) not in self.idle

    @property
    def switch(self) -> str:
        """Flag, with its values, or function that switches the feature on; "" if every job uses it.

        For example "--holmes-overlap auto or on".
        """
        if self.enabling_function:
            return self.enabling_function
        if not self.option:
            return ""
        values = [value for value in choices_of(self.option) if value not in self.idle]
        return f"{flag(self.option)} {' or '.join(values)}".strip()

    def version_misfit(self, version: str | None) -> str | None:
        """Return why the feature does not support a version of its framework; None if it does.

        Args:
            version: None if the framework is not installed. A version that names no release is supported.
        """
        name = self.requirement.name
        supported = self.requirement.specifier  # e.g. ">=2.4"
        if version is None:
            return f"{name} is not installed"
        release = release_of(version)
        if release is UNKNOWN or supported.contains(release):
            return None
        return f"{name} {version} is not supported (needs {supported})"

    def warning_if_newer_than_tried(self, version: str | None) -> str:
        """Return a warning if a framework is newer than all versions the feature was run with.

        The patches of the feature are then applied all the same if each of them fits the framework:
        its function exists and has the expected parameters. The warning says so. Only major and
        minor release numbers are compared. A version that names no release, such as that of a git
        checkout, may be newer, so it gets a warning, too.

        Args:
            version: Version of the framework; None if it is not installed.

        Returns:
            The warning. "" if the framework is not newer or not installed, or if the feature does
            not list the versions it was run with (field `tried`).
        """
        if version is None or not self.tried:
            return ""
        newest_tried = max(map(Version, self.tried))
        release = release_of(version)  # UNKNOWN if it names no release
        if release is UNKNOWN:
            status = "names no release"
        elif (release.major, release.minor) > (newest_tried.major, newest_tried.minor):
            status = f"is newer than {newest_tried}, the newest that was tried"
        else:
            return ""
        # The patches whose targets have the expected signature are used all the same.
        return f"{self.requirement.name} {version} {status}; holmes patches what looks as expected"


@dataclass(frozen=True)
class Patch:
    """Change that holmes makes to one attribute of a framework, its target.

    The target is e.g. a function or method.

    Either the field `wrap` is set, a function that runs instead of the target, or `replace`, a function that
    returns the attribute's new value.

    Raises:
        ValueError: a field is malformed.
    """

    feature: Feature  # the group of patches that are applied together
    target: str  # "module:qualname", as in "deepspeed.runtime.pipe.p2p:send"
    reason: str  # why the framework must be changed here: one line for `holmes patches`

    #: Called instead of the target as wrap(wrapped, instance, args, kwargs), the convention of the package
    #: wrapt. `wrapped` is the target, bound to `instance` if it is a method. `instance` is None for functions
    #: and static methods. The decorator by_name (wrap.py) makes such a function.
    wrap: Callable[..., Any] | None = None

    #: Called as replace(original), returns the new value of the attribute. `original` is the value as it is
    #: stored in the module or class, e.g. a staticmethod object.
    replace: Callable[[Any], Any] | None = None

    #: Parameters that the target must have: otherwise the feature is switched off. The parameters that
    #: by_name (wrap.py) found are added.
    parameters: tuple[str, ...] = ()

    #: PEP 440 range of the feature's versions that have this target; "" for all of them.
    only: str = ""

    def __post_init__(self) -> None:
        read_by_wrap = getattr(self.wrap, "parameters", ())
        without_duplicates = dict.fromkeys((*self.parameters, *read_by_wrap))
        # The dataclass is frozen, so a plain assignment would raise an error.
        object.__setattr__(self, "parameters", tuple(without_duplicates))
        SpecifierSet(self.only)  # raises InvalidSpecifier, a ValueError, if the range is malformed
        if not _TARGET.fullmatch(self.target):
            raise ValueError(f"target must be 'module:qualname', not {self.target!r}")
        if (self.wrap is None) == (self.replace is None):
            raise ValueError(f"{self.target}: give exactly one of wrap and replace")

    @property
    def module(self) -> str:
        """Name of the framework's module, e.g. "deepspeed.runtime.pipe.p2p"."""
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        """Name of the attribute inside its module, e.g. "send" or "PipelineEngine.train_batch"."""
        return self.target.partition(":")[2]

    def is_for_version(self, version: str | None) -> bool:
        """Return whether the patch is meant for this version of the framework.

        The field `only` limits a patch to the versions that have the patched function. An unknown version
        (None) is accepted.
        """
        if not self.only or version is None:
            return True
        return SpecifierSet(self.only).contains(release_of(version))


class PatchModule(NamedTuple):
    """Module of holmes with patches. It is imported only in a job that needs these patches."""

    name: str  # e.g. "holmes_ext.patches.deepspeed.stage_links"
    features: tuple[Feature, ...]  # features of the patches in the module
    package: str  # package of the framework whose import makes the patches necessary


class PatchStatus(NamedTuple):
    """State of one patch in this process, for the command `holmes patches`.

    A patch is a change of holmes to an attribute of a framework.
    """

    feature: str  # name of the group of patches that the patch belongs to
    target: str  # the patched attribute, as "module:qualname"
    state: str  # "waiting" (for an import), "applied", "off" or "other version" (made for another version)
    reason: str  # why the patch is off; in the other states, why it exists
    version: str | None  # of the framework, as installed


#: FeatureState.off_reason of a feature that was never enabled. No message reports it.
UNWANTED = "not enabled"


class FeatureState:
    """State of one feature in this process.

    A feature is a group of patches of one framework. They are all applied, or none is.
    """

    def __init__(self, feature: Feature):
        self.feature = feature
        self.patches: list[Patch] = []  # all patches of the feature, applied or not
        # Whether an error is raised if a patch does not fit the framework; else the feature is switched off.
        self.is_required = False
        # Whether the first patches are applied; others may wait for the import of their module.
        self.has_begun = False
        # Whether the feature is used under an unsupported version if all of its patches fit (--holmes-try).
        self.is_forced = False
        self.off_reason: str | None = UNWANTED  # None while the feature is on
        self.applied: list[Patch] = []  # in the order in which they were applied
        self.version: str | None = None  # version of the framework; None if it is not known yet

    @property
    def modules(self) -> list[str]:
        """Names of the framework's modules that the patches change, sorted."""
        return sorted({patch.module for patch in self.patches})

    def state_of(self, patch: Patch) -> str:
        """Return the state of one patch of the feature, in words for the command `holmes patches`.

        Returns:
            "applied", or why the patch is not applied:

            - "waiting": the program has not imported the framework's module yet
            - "off": the feature is switched off
            - "other version": the patch is not for the installed version of the framework
        """
        if self.off_reason:
            return "off"
        if not patch.is_for_version(self.version):
            return "other version"
        return "applied" if patch in self.applied else "waiting"

    def misfit(self) -> str | None:
        """Return why the feature does not support the framework's version; None if it does.

        With --holmes-try, every version counts as supported.
        """
        if self.is_forced and self.version is not None:
            return None
        return self.feature.version_misfit(self.version)

    @property
    def is_untried(self) -> bool:
        """True if the feature is on under a version that it does not support (--holmes-try)."""
        is_on = self.off_reason is None
        if not is_on or not self.is_forced or self.version is None:
            return False
        return self.feature.version_misfit(self.version) is not None
