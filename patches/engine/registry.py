"""The registry: applies the patches of the features that are wanted, undoes them exactly, and says what it did.

Features are all or nothing, but the modules they patch are imported one by one, and importing them early
would change the program. So a feature is judged three times, each time as far as can be known:

    enable()                        the installed distributions' versions
    its first module is imported    every patch: version, target, parameters; of modules that are not
                                    imported yet by reading their source (source.py)
    each further module             the same once more, now on what was really imported

A misfit at any of these times switches the whole feature off: what it had applied is undone, the reason is kept
for report(), and training goes on. If the user asked for the feature by name (required), HolmesError is
raised instead, from enable() or from the import. Nothing else ever escapes into an import.

Modules are only watched (wrapt's post-import hooks), never imported from here. Hooks cannot be taken back;
after undo() they find nothing to do.
"""

import functools
import hashlib
import logging
import os
import sys
import threading
from collections.abc import Iterable, Mapping

import wrapt

from holmes_ext import __version__
from holmes_ext.errors import HolmesError
from holmes_ext.patches.engine.location import Misfit, Site
from holmes_ext.patches.engine.patch import Patch, PatchStatus
from holmes_ext.patches.engine.source import source_misfit
from holmes_ext.words import did_you_mean

_log = logging.getLogger(__name__)


def disabled_features(environ: Mapping[str, str], known: Iterable[str]) -> frozenset[str]:
    """The features that HOLMES_DISABLE=feature,... switches off; "all" stands for every known one.

    HolmesError names an unknown feature and the nearest known one.
    """
    known = set(known)
    names = {name.strip() for name in environ.get("HOLMES_DISABLE", "").split(",")} - {""}
    for name in sorted(names - known - {"all"}):
        raise HolmesError(f"HOLMES_DISABLE: {_unknown(name, known | {'all'})}")
    return frozenset(known if "all" in names else names)


def _unknown(name, known):
    return f"there is no feature {name!r}; {did_you_mean(name, sorted(known))}"


class _NotLoaded(Exception):
    """A module of that name belongs to another framework: off, and nothing that a user must be told."""


class _Feature:
    """The patches of one feature and how far they have come."""

    def __init__(self, name):
        self.name = name
        self.patches: list[Patch] = []
        self.required = self.begun = False
        self.off = "not enabled"  # why it is off; None while it is on
        self.sites: dict[Patch, Site] = {}  # of the patches that are applied
        self.versions: dict[Patch, str | None] = {}


class Registry:
    """Patches, and what became of each in this process. Every method may be called from any thread."""

    def __init__(self, patches: Iterable[Patch] = ()):
        self._lock = threading.RLock()
        self._features: dict[str, _Feature] = {}
        self._sites: dict[str, Site] = {}  # by target, of the patches that are applied
        self._watched: set[str] = set()
        for patch in patches:
            self.register(patch)

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features that have patches."""
        return tuple(self._features)

    def register(self, patch: Patch) -> None:
        """Add a patch to its feature. ValueError when the feature is on, or patches the same target already."""
        with self._lock:
            feature = self._features.setdefault(patch.feature, _Feature(patch.feature))
            if feature.off is None or any(patch.target == other.target for other in feature.patches):
                raise ValueError(f"{patch.feature}: {patch.target} is registered twice, or too late")
            feature.patches.append(patch)

    def enable(self, features: Iterable[str] | str, required: bool = False, disabled: frozenset[str] | None = None) -> None:
        """Apply the patches of these features, now where their modules are imported, else when they are.

        required: a misfit raises HolmesError (here or from the import) instead of switching the feature off.
        disabled: features that stay off; by default those in HOLMES_DISABLE.
        HolmesError names an unknown feature, here or in HOLMES_DISABLE.
        """
        names = [features] if isinstance(features, str) else list(features)
        if disabled is None:
            disabled = disabled_features(os.environ, self._features)
        for name in names:
            if name not in self._features:
                raise HolmesError(_unknown(name, self._features))
        for name in names:
            feature = self._features[name]
            with self._lock:
                if name in disabled:
                    self._remove(feature)
                    feature.off = "switched off by HOLMES_DISABLE"
                    continue
                feature.required |= required
                if feature.off is None:
                    continue
                feature.off, feature.begun = None, False
                modules = sorted({patch.module for patch in feature.patches})
                half = [module for module in modules if module in sys.modules and not _is_imported(module)]
                reason = f"{half[0]} is just being imported: enable holmes before" if half else self._version_misfit(feature)
                if reason:
                    self._switch_off(feature, reason)
                    continue
            for module in modules:
                self._watch(module)

    def undo(self) -> None:
        """Take every patch off: each attribute and copy holds its original object again, inherited ones are gone again."""
        with self._lock:
            for feature in self._features.values():
                self._remove(feature)
                feature.off, feature.required = "undone" if feature.off is None else feature.off, False

    def report(self) -> list[PatchStatus]:
        """The state of every patch, in the order of registration within each feature."""
        with self._lock:
            return [PatchStatus(feature.name, patch.target, self._state(feature, patch), feature.off or patch.reason,
                                feature.versions.get(patch)) for feature in self._features.values() for patch in feature.patches]

    def digest(self) -> str:
        """SHA-256 (hex) of what is on: equal on ranks that are patched alike.

        Covers this package's version and, for every patch, target, on or off, and the framework's version. A patch
        that waits counts as on, since a rank may import a module later than another: compare after the
        frameworks are imported.
        """
        lines = sorted(f"{target} {state}" for target, state in self.states().items())
        return hashlib.sha256("\n".join([__version__, *lines]).encode()).hexdigest()

    def states(self) -> dict[str, str]:
        """What digest() covers: "feature target" -> "off" or "on VERSION"."""
        with self._lock:
            return {f"{feature.name} {patch.target}": "off" if feature.off else f"on {feature.versions.get(patch)}"
                    for feature in self._features.values() for patch in feature.patches}

    def enable_installed(self, required: Iterable[str] = ()) -> None:
        """enable() for every feature whose framework is installed; those in `required` must fit, installed or not."""
        required = set(required)
        self.enable(required, required=True)
        self.enable(name for name, feature in self._features.items()
                    if name not in required and all(patch.version_of or patch.installed() for patch in feature.patches))

    @staticmethod
    def _state(feature, patch):
        return "off" if feature.off else "applied" if patch in feature.sites else "waiting"

    def _watch(self, name):
        """Have _imported called once the module is imported, or now. Not under the lock: wrapt may call at once."""
        with self._lock:
            watched = name in self._watched
            self._watched.add(name)
        if not watched:
            wrapt.register_post_import_hook(functools.partial(self._imported, name), name)
        elif _is_imported(name):
            self._imported(name)

    def _imported(self, name, module=None):
        """wrapt's hook: the module has been imported."""
        with self._lock:
            self._watched.discard(name)
            for feature in self._features.values():
                if feature.off is None and any(patch.module == name for patch in feature.patches):
                    self._advance(feature, name)

    def _advance(self, feature, imported):
        """Check all that can be known of the feature now, then apply the patches whose modules are imported."""
        pending = [patch for patch in feature.patches if patch not in feature.sites]
        ready = [patch for patch in pending if patch.module == imported or _is_imported(patch.module)]
        try:
            for patch in ready:  # first: these know best which framework it is
                self._check(feature, patch)
            for patch in pending:
                if patch not in ready and not feature.begun and (reason := source_misfit(patch)):
                    raise Misfit(reason)
            feature.begun = True
            for patch in ready:
                site = self._sites.get(patch.target) or Site(patch)
                site.add(patch)
                self._sites[patch.target] = feature.sites[patch] = site
        except _NotLoaded as other:
            self._switch_off(feature, str(other), level=logging.DEBUG)
        except Misfit as misfit:
            self._switch_off(feature, str(misfit))
        except Exception as error:  # a patch's replace or version_of, or a framework's odd source: not the user's fault
            _log.debug("holmes: feature %s", feature.name, exc_info=True)
            self._switch_off(feature, f"{type(error).__name__}: {error}", error)

    def _check(self, feature, patch):
        if patch.version_of:
            feature.versions[patch] = patch.version_of()
            if feature.versions[patch] is None:
                raise _NotLoaded(f"what is loaded is not {patch.requirement.name}")
            reason = patch.version_misfit(feature.versions[patch])
            if reason:
                raise Misfit(reason)
        (self._sites.get(patch.target) or Site(patch)).check(patch)

    def _version_misfit(self, feature):
        """Why the installed distributions do not fit, or None."""
        reasons = []
        for patch in feature.patches:
            if not patch.version_of:
                feature.versions[patch] = patch.installed()
                reasons.append(patch.version_misfit(feature.versions[patch]))
        return next(filter(None, reasons), None)

    def _switch_off(self, feature, reason, cause=None, level=logging.WARNING):
        self._remove(feature)
        feature.off = reason
        if feature.required:
            raise HolmesError(f"feature {feature.name} cannot be used: {reason}") from cause
        _log.log(level, "holmes: feature %s is off: %s", feature.name, reason)

    def _remove(self, feature):
        for patch, site in reversed(list(feature.sites.items())):
            site.remove(patch)
            if not site.patches:
                del self._sites[site.target]
        feature.sites.clear()


def _is_imported(name):
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)
