"""The registry: applies the patches of wanted features, undoes them exactly, and says what it did.

Features are all or nothing, but the modules they patch are imported one by one, and importing them early
would change the program. So a feature is judged three times, each time as far as can be known:

    enable()                        the installed distribution's version
    its first module is imported    every patch: version, target, parameters; of other modules by source.py
    each further module             the same once more, now on what was really imported

A misfit switches the whole feature off: what it had applied is undone, the reason is kept for statuses(), and
training goes on. If the user asked for the feature by name (required), HolmesError is raised instead, from
enable() or from the import. Nothing else escapes into an import.

Modules are only watched (wrapt's post-import hooks, which stay and find nothing to do after undo()).
"""

import functools
import logging
import os
import sys
import threading
from collections.abc import Iterable, Mapping

import wrapt

from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.patches.engine.location import Location, Misfit
from holmes_ext.patches.engine.patch import Feature, Patch, PatchStatus
from holmes_ext.patches.engine.source import source_misfit
from holmes_ext.words import did_you_mean

_log = logging.getLogger(__name__)
#: Features that are no more: switching them off is no mistake.
_FORMER = ("overlap-gather",)
#: Why a feature is off that nobody wanted: nothing that a user must be told.
_UNWANTED = "not enabled"


def disabled_features(environ: Mapping[str, str], known: Iterable[str]) -> frozenset[str]:
    """The features that HOLMES_DISABLE=feature,... switches off, "all" for every known one; HolmesError names
    an unknown one and the nearest known."""
    return _features_named("HOLMES_DISABLE", environ.get("HOLMES_DISABLE", ""), known)


def _features_named(source: str, text: str, known: Iterable[str]) -> frozenset[str]:
    known = list(known)
    names = {name.strip() for name in text.split(",")} - {""}
    if unknown := sorted(names - {*known, *_FORMER, "all"}):
        raise HolmesError(f"{source}: {_unknown(unknown[0], [*known, 'all'])}")
    return frozenset(known if "all" in names else names)


def _unknown(name: str, known: Iterable[str]) -> str:
    return f"there is no feature {name!r}; {did_you_mean(name, sorted(known))}"


class _NotLoaded(Exception):
    """A module of that name belongs to another framework: off, and nothing that a user must be told."""


class _Progress:
    """State of a feature: a group of patches of a framework, which are all applied or not at all."""

    def __init__(self, feature: Feature):
        self.feature = feature
        self.patches: list[Patch] = []
        self.required = False  # whether an error is raised if a patch does not fit the framework
        self.begun = False  # whether the first patches are applied; others may wait for an import
        self.anyway = False  # used under a version that was not tried, if all of its patches fit
        self.off: str | None = _UNWANTED  # why it is off; None while it is on
        self.applied: dict[Patch, Location] = {}
        self.version: str | None = None  # of the framework, as installed

    def state(self, patch: Patch) -> str:
        if self.off:
            return "off"
        if not patch.is_for_version(self.version):
            return "other version"
        return "applied" if patch in self.applied else "waiting"

    def misfit(self) -> str | None:
        """Why the version found does not do; None where it does, or the user tries it all the same."""
        reason = self.feature.version_misfit(self.version)
        return None if self.anyway and self.version is not None else reason

    @property
    def untried(self) -> bool:
        """Whether it is on under a version outside its range."""
        known = self.off is None and self.anyway and self.version is not None
        return known and self.feature.version_misfit(self.version) is not None


class Registry:
    """Patches, and what became of each in this process. Every method may be called from any thread."""

    def __init__(self, patches: Iterable[Patch] = ()):
        self._lock = threading.RLock()
        self._features: dict[str, _Progress] = {}
        self._locations: dict[str, Location] = {}  # by target, of the patches that are applied
        self._watched: set[str] = set()
        for patch in patches:
            name, target = patch.feature.name, patch.target
            progress = self._features.setdefault(name, _Progress(patch.feature))
            if patch.feature != progress.feature or target in [other.target for other in progress.patches]:
                raise ValueError(f"{name}: {target} is given twice, or in two features of one name")
            progress.patches.append(patch)

    def enable(self, names: Iterable[str], required: bool = False,
               disabled: frozenset[str] | None = None) -> None:
        """Apply the patches of these features, now where their modules are imported, else when they are.

        required: a misfit raises HolmesError (here or from the import) instead of switching the feature off.
        disabled: features that stay off; by default those in HOLMES_DISABLE.
        """
        names = list(names)
        disabled = self.switched_off() if disabled is None else disabled
        for name in names:
            if name not in self._features:
                raise HolmesError(_unknown(name, self._features))
        for name in names:
            progress = self._features[name]
            with self._lock:
                if name in disabled:
                    self._remove(progress)
                    progress.off = "switched off by HOLMES_DISABLE"
                    continue
                progress.required |= required
                if progress.off is None:
                    continue
                progress.off, progress.begun = None, False
                modules = sorted({patch.module for patch in progress.patches})
                half = [module for module in modules if module in sys.modules and not _is_imported(module)]
                reason = f"{half[0]} is just being imported: enable holmes before" if half else None
                if not reason and not progress.feature.version_of:
                    progress.version = progress.feature.installed()
                    reason = progress.misfit()
                if reason:
                    self._switch_off(progress, reason, level=logging.INFO)  # the start line says it
                    continue
            for module in modules:
                self._watch(module)

    def enable_asked_for(self, options: Options) -> None:
        """enable() what the options ask for and whose framework is installed; options.required_features must
        fit, installed or not; those in options.try_ are used under any version."""
        for name in _features_named("--holmes-try", options.try_, self._features):
            self._features[name].anyway = True
        required = set(options.required_features)
        self.enable(required, required=True)
        for name in sorted(required):
            if not (feature := self._features[name].feature).asked_for(options):
                raise HolmesError(
                    f"--holmes-require {name}: it is used with {feature.asked_by}; give that too")
        wanted = [progress.feature for name, progress in self._features.items() if name not in required]
        self.enable(feature.name for feature in wanted
                    if feature.asked_for(options) and (feature.version_of or feature.installed()))
        for progress in self._features.values():
            progress.required |= progress.feature.binding and progress.off is None

    def undo(self) -> None:
        """Take every patch off: each attribute and copy is its original again, inherited ones are gone."""
        with self._lock:
            for progress in self._features.values():
                self._remove(progress)
                progress.off = "undone" if progress.off is None else progress.off
                progress.required = progress.anyway = False

    def switched_off(self) -> frozenset[str]:
        """The features that HOLMES_DISABLE leaves off."""
        return disabled_features(os.environ, self._features)

    def is_on(self, name: str) -> bool:
        """Whether this feature is applied, or will be."""
        return self._features[name].off is None

    def statuses(self) -> list[PatchStatus]:
        """The state of every patch, in the order of registration within each feature."""
        with self._lock:
            return [PatchStatus(name, patch.target, progress.state(patch), progress.off or patch.reason,
                                progress.version)
                    for name, progress in self._features.items() for patch in progress.patches]

    def summary(self) -> tuple[list[str], dict[str, str]]:
        """Features that are on (where a framework shows only when it is imported, from then), and those that
        are off though they were wanted, with the reason."""
        with self._lock:
            on = [name for name, progress in self._features.items()
                  if progress.off is None and (progress.applied or not progress.feature.version_of)]
            return on, {name: progress.off for name, progress in self._features.items()
                        if progress.off and progress.off != _UNWANTED}

    def untried(self) -> dict[str, list[str]]:
        """ "deepspeed 0.20.0" -> features that are on under it, outside their range, as the user asked."""
        by_version: dict[str, list[str]] = {}
        with self._lock:
            for name, progress in self._features.items():
                if progress.untried:
                    version = f"{progress.feature.requirement.name} {progress.version}"
                    by_version.setdefault(version, []).append(name)
        return by_version

    def beyond_tried(self) -> list[str]:
        """Of the versions under which features are on, those that nobody tried."""
        with self._lock:
            texts = {progress.feature.beyond_tried(progress.version) for progress in self._features.values()
                     if progress.off is None and not progress.untried}
            return sorted(texts - {""})

    def states(self) -> dict[str, str]:
        """ "feature target" -> "off" or "on VERSION": equal on ranks that are patched alike. A patch that
        waits counts as on, since a rank may import a module later than another."""
        with self._lock:
            return {f"{name} {patch.target}": "off" if progress.off else f"on {progress.version}"
                    for name, progress in self._features.items() for patch in progress.patches}

    def _watch(self, name):
        """Have _imported called once the module is there. Not under the lock: wrapt may call at once."""
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
            for progress in self._features.values():
                if progress.off is None and any(patch.module == name for patch in progress.patches):
                    self._advance(progress, name)

    def _advance(self, progress, imported):
        """Apply the patches of a feature whose modules are imported. If one does not fit, switch all off.

        Args:
            progress: State of the feature.
            imported: Name of a module whose import has just ended.
        """
        try:
            self._apply_ready_patches(progress, imported)
        except _NotLoaded as other:
            # A binding feature is required only with its own framework. Here another one was imported.
            if progress.feature.binding:
                progress.required = False
            self._switch_off(progress, str(other), level=logging.DEBUG)
        except Misfit as misfit:
            self._switch_off(progress, str(misfit))
        except Exception as error:
            # a patch's replace or version_of, or a framework's odd source: not the user's fault
            _log.debug("holmes: feature %s", progress.feature.name, exc_info=True)
            self._switch_off(progress, f"{type(error).__name__}: {error}", error)

    def _apply_ready_patches(self, progress, imported):
        """Apply the patches of a feature whose modules are imported, after checking all of its patches.

        Args:
            progress: State of the feature.
            imported: Name of a module whose import has just ended.

        Raises:
            _NotLoaded: the imported module belongs to another framework with the same module name.
            Misfit: a patch does not fit the installed version of the framework.
        """
        if progress.feature.version_of:  # the version can be read only after the import
            progress.version = progress.feature.version_of()
            if progress.version is None:
                raise _NotLoaded(f"what is loaded is not {progress.feature.requirement.name}")
            reason = progress.misfit()  # why the version is not supported
            if reason:
                raise Misfit(reason)

        # Patches that are not applied yet: `ready` are those whose module is imported, the others wait.
        pending = [
            patch
            for patch in progress.patches
            if patch not in progress.applied and patch.is_for_version(progress.version)
        ]
        ready = [patch for patch in pending if patch.module == imported or _is_imported(patch.module)]
        # The attributes to change: a Location is shared by all patches of one attribute.
        locations = {patch: self._locations.get(patch.target) or Location(patch) for patch in ready}
        for patch, location in locations.items():
            location.check(patch)
        if not progress.begun:
            # Before the first patch is applied, those that wait are checked, too: in the source code.
            waiting = [patch for patch in pending if patch not in ready]
            for patch in waiting:
                reason = source_misfit(patch)
                if reason:
                    raise Misfit(reason)
        progress.begun = True  # the check of the source code is made once
        for patch, location in locations.items():
            location.add(patch)
            self._locations[patch.target] = location
            progress.applied[patch] = location

    def _switch_off(self, progress, reason, cause=None, level=logging.WARNING):
        self._remove(progress)
        progress.off, name = reason, progress.feature.name
        if progress.required:
            raise HolmesError(f"feature {name} cannot be used: {reason}") from cause
        _log.log(level, "holmes: feature %s is off: %s", name, reason)

    def _remove(self, progress):
        for patch, location in reversed(list(progress.applied.items())):
            location.remove(patch)
            if not location.patches:
                del self._locations[location.target]
        progress.applied.clear()


def _is_imported(name):
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)
