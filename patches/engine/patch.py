"""A patch of a framework: a value that says what to change, where it fits and why. It changes nothing itself."""

import functools
import importlib.metadata
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_REBIND = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_][\w.]*)(?:\[(\w+|\*)\])?")


@functools.cache
def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Patch:
    """One change to one attribute of a framework.

    feature     the feature it belongs to; all patches of a feature are applied, or none.
    target      "module:qualname", as in "deepspeed.runtime.pipe.p2p:send".
    versions    distribution and PEP 440 range, as in "deepspeed>=0.19,<0.20".
    reason      one line for `holmes patches`: why the framework must be changed here.
    wrap        wrap(wrapped, instance, args, kwargs), called instead of the target (wrapt's convention:
                wrapped is bound already; instance is None for plain functions and static methods).
    replace     replace(original) -> the object to put in its place; original as stored (a staticmethod
                object stays one). Give exactly one of wrap and replace.
    parameters  names of the target's parameters that wrap or replace relies on.
    rebind      further places that hold the target: "module:qualname" for an attribute, and
                "module:qualname[KEY]" for an entry of a dict, where KEY is a string key, the __name__ of a key
                that is a class or function, or * for every entry that holds the target. Copies made by
                `from x import f` within the target's top-level package need not be named.
    version_of  version_of() -> version or None, for a module that is not (only) installed as a distribution: vendored,
                or run from a source tree. Called once the target's module is imported, and instead of
                the installed distribution's metadata. None: another framework's module of that name; the feature
                is off without a warning.

    ValueError when a field is malformed (an error of whoever wrote the patch).
    """

    feature: str
    target: str
    versions: str
    reason: str
    wrap: Callable | None = None
    replace: Callable | None = None
    parameters: tuple[str, ...] = ()
    rebind: tuple[str, ...] = ()
    version_of: Callable[[], str | None] | None = None

    def __post_init__(self):
        if not _TARGET.fullmatch(self.target):
            raise ValueError(f"target must be 'module:qualname', not {self.target!r}")
        if (self.wrap is None) == (self.replace is None):
            raise ValueError(f"{self.target}: give exactly one of wrap and replace")
        for place in self.rebind:
            if not _REBIND.fullmatch(place):
                raise ValueError(f"{self.target}: rebind must be 'module:qualname' or 'module:qualname[key]', not {place!r}")
        Requirement(self.versions)  # InvalidRequirement is a ValueError

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.target.partition(":")[2]

    @cached_property
    def requirement(self) -> Requirement:
        return Requirement(self.versions)

    def rebind_places(self) -> list[tuple[str, str, str | None]]:
        """The places in `rebind`, as (module, qualname, key or None)."""
        return [_REBIND.fullmatch(place).groups() for place in self.rebind]

    def installed(self) -> str | None:
        """The installed distribution's version, from its metadata: nothing is imported. None when it is not installed."""
        return _installed(self.requirement.name)

    def version_misfit(self, version: str | None) -> str | None:
        """Why the patch does not support this version (None: not installed), or None when it does.

        Pre-releases and local builds (0.20.0rc1, 2.13.0+cpu) are judged as PEP 440 orders them.
        """
        name, supported = self.requirement.name, self.requirement.specifier
        if version is None:
            return f"{name} is not installed"
        try:
            fits = supported.contains(Version(version), prereleases=True)
        except InvalidVersion:
            return f"{name} calls its version {version!r}, which cannot be compared with the supported {supported}"
        return None if fits else f"{name} {version} is not supported (needs {supported})"


@dataclass(frozen=True)
class PatchStatus:
    """What became of a patch. state: "waiting" (for its module to be imported), "applied" or "off"; version: what was
    found, None when nothing was; reason: why it is off, else the patch's own reason."""

    feature: str
    target: str
    state: str
    reason: str
    version: str | None

    def __post_init__(self):
        assert self.state in ("waiting", "applied", "off"), self.state
