"""Describes the changes that holmes makes to a framework (torch, DeepSpeed, ...) at run time.

    Patch      one change to one attribute of a module or class, e.g. a wrapper around a function
    Feature    a group of patches that are applied together, for a range of the framework's versions

The registry (registry.py) applies patches when their modules are imported.
"""

import functools
import importlib.metadata
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

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


#: Stands for a version that does not name a release: it counts as newer than all known releases.
UNKNOWN = Version("9999")


@functools.cache
def release_of(version: str) -> Version:
    """Return the release to which a version of a package belongs, e.g. 2.7.0 for 2.7.0a0+79aa17489c.nv25.4.

    Some versions name no release, e.g. 0+unknown or 0.1.dev1+g1234567 of a git checkout: UNKNOWN is returned.
    """
    try:
        release = Version(Version(version).base_version)
    except InvalidVersion:
        return UNKNOWN
    # A git checkout without tags has a version like 0 or 0.1, which names no release.
    return release if release > Version("0.1") else UNKNOWN


@dataclass(frozen=True)
class Feature:
    """Group of patches (changes to a framework) that are all applied, or not at all."""

    name: str  # as HOLMES_DISABLE and --holmes-require take it
    versions: str  # package and PEP 440 range, as in "deepspeed>=0.19,<0.20"
    tried: tuple[
        str, ...
    ] = ()  # versions that the feature was run with, at least the oldest and the newest
    option: str = ""  # name of the option that switches the feature on; "" if every job uses it
    idle: tuple[str, ...] = ()  # values of `option` that leave the feature off

    #: Returns the version of the imported framework, if its package has no metadata: it is vendored, or runs
    #: from a source tree. None if the imported module belongs to another framework: the feature is then off
    #: without a warning.
    version_of: Callable[[], str | None] | None = None

    read: tuple[str, ...] = ()  # versions whose source was compared only, without a run
    binding: bool = (
        False  # whether the job ends if the framework is imported and a patch does not fit it
    )
    what: str = ""  # what the feature does for the user, in a few words
    #: The function of holmes_ext that switches the feature on when a program uses it, instead of an option.
    only_by: str = ""

    def __post_init__(self):
        Requirement(
            self.versions
        )  # raises InvalidRequirement, a ValueError, if the range is malformed

    @cached_property
    def requirement(self) -> Requirement:
        return Requirement(self.versions)

    def installed(self) -> str | None:
        return installed_version(self.requirement.name)

    def asked_for(self, options: Options) -> bool:
        if self.only_by:
            return False
        return not self.option or options.value(self.option) not in self.idle

    @property
    def asked_by(self) -> str:
        """What switches the feature on, e.g. "--holmes-overlap auto or on"; "" if every job uses it."""
        if self.only_by:
            return self.only_by
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

    def beyond_tried(self, version: str | None) -> str:
        """Return a message if a version of the framework is newer than all that were tried; "" if it is not.

        Only major and minor release numbers are compared. A version that names no release counts as newer.
        """
        newest = max(map(Version, self.tried), default=UNKNOWN)
        # release[:2] is (major, minor), e.g. (2, 7) of 2.7.1
        if version is None or release_of(version).release[:2] <= newest.release[:2]:
            return ""
        names_no_release = release_of(version) is UNKNOWN
        status = (
            "says nothing"
            if names_no_release
            else f"is newer than {newest}, the newest that was tried"
        )
        return f"{self.requirement.name} {version} {status}: patches that fit are on"


@dataclass(frozen=True)
class Patch:
    """Change that holmes makes to one attribute of a framework (the target), e.g. to a function or method.

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
    wrap: Callable | None = None

    #: Called as replace(original), returns the new value of the attribute. `original` is the value as it is
    #: stored in the module or class, e.g. a staticmethod object.
    replace: Callable | None = None

    #: Parameters that the target must have: otherwise the feature is switched off. The parameters that
    #: by_name (wrap.py) found are added.
    parameters: tuple[str, ...] = ()

    only: str = (
        ""  # PEP 440 range of the feature's versions that have this target; "" for all of them
    )

    def __post_init__(self):
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
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.target.partition(":")[2]

    def is_for_version(self, version: str | None) -> bool:
        """Return whether the patch is meant for this version of the framework.

        The field `only` limits a patch to the versions that have the patched function. An unknown version
        (None) is accepted.
        """
        return (
            not self.only
            or version is None
            or SpecifierSet(self.only).contains(release_of(version))
        )


class PatchModule(NamedTuple):
    """Module of holmes with a tuple PATCHES, which is imported only in a job that needs these patches."""

    name: str  # e.g. "holmes_ext.patches.deepspeed.stage_links"
    features: tuple[Feature, ...]  # those of its patches
    package: str  # the program imports this package before it can use what the patches change


class PatchStatus(NamedTuple):
    """State of one patch (a change to a framework's attribute) in this process, for `holmes patches`."""

    feature: str
    target: str
    state: str  # "waiting" (for an import), "applied", "off" or "other version" (made for another version)
    reason: str  # why the patch is off; in the other states, why it exists
    version: str | None  # of the framework, as installed
