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
from holmes_ext.patches.engine.location import Location, Misfit, source_misfit
from holmes_ext.patches.engine.patch import Feature, Patch, PatchStatus
from holmes_ext.words import did_you_mean

_log = logging.getLogger(__name__)
#: Why a feature is off that nobody has asked for. The user is not told about it.
_UNWANTED = "not enabled"


def disabled_features(environ: Mapping[str, str], known: Iterable[str]) -> frozenset[str]:
    """Return the features that HOLMES_DISABLE=feature,... switches off; "all" stands for every known feature.

    Raises:
        HolmesError: a feature is not known (raised by _features_named). The message has the nearest known.
    """
    return _features_named("HOLMES_DISABLE", environ.get("HOLMES_DISABLE", ""), known)


def _features_named(source: str, text: str, known: Iterable[str]) -> frozenset[str]:
    """Return the features that a list separated by commas names; "all" stands for every known feature.

    Args:
        source: The option or variable that has the list, for the error message.
        text: The list, e.g. "ddp,fsdp".

    Raises:
        HolmesError: a feature is not known. The message has the nearest known name.
    """
    known = list(known)
    names = {name.strip() for name in text.split(",")} - {""}
    if unknown := sorted(names - {*known, "all"}):
        raise HolmesError(f"{source}: {_unknown(unknown[0], [*known, 'all'])}")
    return frozenset(known if "all" in names else names)


def _unknown(name: str, known: Iterable[str]) -> str:
    return f"there is no feature {name!r}; {did_you_mean(name, sorted(known))}"


class _NotLoaded(Exception):
    """The imported module belongs to another framework, which has a module of the same name.

    The feature is then switched off, and the user is not told.
    """


class _Progress:
    """State of a feature: a group of patches of a framework, which are all applied or not at all."""

    def __init__(self, feature: Feature):
        self.feature = feature
        self.patches: list[Patch] = []
        # Whether an error is raised if a patch does not fit the framework; else the feature is switched off.
        self.required = False
        self.begun = False  # whether the first patches are applied; others may wait for an import
        self.anyway = False  # used under a version that was not tried, if all of its patches fit
        self.off: str | None = _UNWANTED  # why it is off; None while it is on
        self.applied: dict[Patch, Location] = {}
        self.version: str | None = None  # of the framework, as installed

    def state(self, patch: Patch) -> str:
        """Return the state of one patch of the feature, as in PatchStatus.state."""
        if self.off:
            return "off"
        if not patch.is_for_version(self.version):
            return "other version"
        return "applied" if patch in self.applied else "waiting"

    def misfit(self) -> str | None:
        """Return why the installed version is not supported.

        None if it is supported, or if the user wants to try it (--holmes-try).
        """
        reason = self.feature.version_misfit(self.version)
        return None if self.anyway and self.version is not None else reason

    @property
    def untried(self) -> bool:
        """Whether the feature is on under a version that it does not support (--holmes-try)."""
        is_tried = self.off is None and self.anyway and self.version is not None
        return is_tried and self.feature.version_misfit(self.version) is not None


class Registry:
    """All patches (changes to frameworks), and the state of each in this process.

    Every public method may be called from any thread.
    """

    def __init__(self, patches: Iterable[Patch] = (), elsewhere: Iterable[str] = ()):
        """Collect patches, without applying any.

        Args:
            patches: The patches.
            elsewhere: Names of features whose patches may be added later. Until then they can be switched
                off, but not required.
        """
        self._elsewhere = frozenset(elsewhere)
        self._lock = threading.RLock()
        self._features: dict[str, _Progress] = {}
        self._locations: dict[str, Location] = {}  # by target, of the patches that are applied
        self._watched: set[str] = set()
        self.add(patches)

    def add(self, patches: Iterable[Patch]) -> None:
        """Add patches, without applying them.

        Patches that were added before are left out.

        Raises:
            ValueError: two patches of a feature have the same target, or two features have the same name.
        """
        for patch in patches:
            name, target = patch.feature.name, patch.target
            progress = self._features.setdefault(name, _Progress(patch.feature))
            if any(patch is other for other in progress.patches):
                continue
            if patch.feature != progress.feature or target in [other.target for other in progress.patches]:
                raise ValueError(f"{name}: {target} is given twice, or in two features of one name")
            progress.patches.append(patch)

    def enable(self, names: Iterable[str], required: bool = False,
               disabled: frozenset[str] | None = None) -> None:
        """Apply the patches of some features.

        A patch is applied now if its module is imported, or else when the module is imported later.

        Args:
            names: The features.
            required: Whether HolmesError is raised if a patch does not fit the framework, here or by the
                import. Otherwise the feature is switched off.
            disabled: Features that stay off; by default those in HOLMES_DISABLE.

        Raises:
            HolmesError: a feature is not known, or a required one does not fit (raised by _switch_off).
        """
        names = list(names)
        disabled = self.switched_off() if disabled is None else disabled
        for name in names:
            if name in self._elsewhere and name not in self._features:
                raise HolmesError(f"feature {name} belongs to an extension that this job does not use")
            if name not in self._features:
                raise HolmesError(_unknown(name, self._known_names()))
        for name in names:
            progress = self._features[name]
            with self._lock:
                if name in disabled:
                    self._remove(progress)  # an earlier call may have applied its patches
                    progress.off = "switched off by HOLMES_DISABLE"
                    continue
                progress.required |= required
                if progress.off is None:
                    continue  # an earlier call has enabled it
                progress.off, progress.begun = None, False  # it is on from now on, without applied patches
                modules = sorted({patch.module for patch in progress.patches})
                # A module whose import has begun may lack functions, so patches cannot be judged.
                half_imported = [
                    module for module in modules if module in sys.modules and not _is_imported(module)
                ]
                reason = (
                    f"{half_imported[0]} is just being imported: enable holmes before"
                    if half_imported
                    else None
                )
                # With version_of, the version is known only after the import (_apply_ready_patches).
                if not reason and not progress.feature.version_of:
                    progress.version = progress.feature.installed()
                    reason = progress.misfit()  # why the version is not supported
                if reason:
                    # No warning is needed: the line that holmes prints at the start has the reason.
                    self._switch_off(progress, reason, level=logging.INFO)
                    continue
            for module in modules:
                self._watch(module)  # applies the patches of the module, now or when it is imported

    def enable_asked_for(self, options: Options) -> None:
        """Enable the features that the options ask for, if their framework is installed.

        Features in options.required_features must fit: otherwise, or if their framework is not installed, an
        error is raised. Features in options.try_ are used under any version of their framework.

        Raises:
            HolmesError: an option names an unknown feature (raised by _features_named or enable), or a
                required feature does not fit or is not in use.
        """
        for name in _features_named("--holmes-try", options.try_, self._known_names()):
            if name in self._features:
                self._features[name].anyway = True
        required = set(options.required_features)
        self.enable(required, required=True)
        for name in sorted(required):
            # A required feature must also be in use: another option switches it on (asked_by).
            if not (feature := self._features[name].feature).asked_for(options):
                raise HolmesError(
                    f"--holmes-require {name}: it is used with {feature.asked_by}; give that too")
        wanted = [progress.feature for name, progress in self._features.items() if name not in required]
        # A framework with version_of may have no package, so installed() does not find it.
        self.enable(feature.name for feature in wanted
                    if feature.asked_for(options) and (feature.version_of or feature.installed()))
        for progress in self._features.values():
            # The job ends if the framework of a binding feature is imported later and a patch does not fit.
            progress.required |= progress.feature.binding and progress.off is None

    def undo(self) -> None:
        """Remove every patch. Each changed attribute, and each copy of it, gets its original value again.

        An attribute that its class had inherited is deleted from the class.
        """
        with self._lock:
            for progress in self._features.values():
                self._remove(progress)
                progress.off = "undone" if progress.off is None else progress.off
                progress.required = progress.anyway = False

    def switched_off(self) -> frozenset[str]:
        """Return the features that HOLMES_DISABLE switches off."""
        return disabled_features(os.environ, self._known_names())

    def _known_names(self) -> list[str]:
        return list(dict.fromkeys([*self._features, *self._elsewhere]))

    def is_on(self, name: str) -> bool:
        """Return whether the patches of a feature are applied, or will be when their modules are imported."""
        return self._features[name].off is None

    def statuses(self) -> list[PatchStatus]:
        """Return the state of every patch, in the order of registration within each feature."""
        with self._lock:
            return [PatchStatus(name, patch.target, progress.state(patch), progress.off or patch.reason,
                                progress.version)
                    for name, progress in self._features.items() for patch in progress.patches]

    def summary(self) -> tuple[list[str], dict[str, str]]:
        """Return the features that are on, and those that were wanted but are off, with the reason.

        A feature with version_of counts as on only after its first patches are applied: before the import it
        is not known whether its framework is there.
        """
        with self._lock:
            on = [name for name, progress in self._features.items()
                  if progress.off is None and (progress.applied or not progress.feature.version_of)]
            return on, {name: progress.off for name, progress in self._features.items()
                        if progress.off and progress.off != _UNWANTED}

    def untried(self) -> dict[str, list[str]]:
        """Return the features that are on under a version that they do not support (--holmes-try).

        Returns:
            A dict: framework and version, e.g. "deepspeed 0.20.0" -> names of the features.
        """
        by_version: dict[str, list[str]] = {}
        with self._lock:
            for name, progress in self._features.items():
                if progress.untried:
                    version = f"{progress.feature.requirement.name} {progress.version}"
                    by_version.setdefault(version, []).append(name)
        return by_version

    def beyond_tried(self) -> list[str]:
        """Return a message for each installed version that is newer than all that features were tried with.

        Only features that are on count. Those that untried() returns are left out.
        """
        with self._lock:
            texts = {progress.feature.beyond_tried(progress.version) for progress in self._features.values()
                     if progress.off is None and not progress.untried}
            return sorted(texts - {""})

    def states(self) -> dict[str, str]:
        """Return a dict "feature target" -> "off" or "on VERSION", which is equal on ranks patched alike.

        A patch that waits for an import counts as on, since a rank may import a module later than another.
        """
        with self._lock:
            return {f"{name} {patch.target}": "off" if progress.off else f"on {progress.version}"
                    for name, progress in self._features.items() for patch in progress.patches}

    def _watch(self, name):
        """Let _imported() run for a module: at once if the module is imported, or else after its import.

        The caller must not hold the lock, since wrapt may call _imported() at once.
        """
        with self._lock:
            was_watched = name in self._watched
            self._watched.add(name)
        if not was_watched:
            wrapt.register_post_import_hook(functools.partial(self._imported, name), name)
        elif _is_imported(name):
            self._imported(name)

    def _imported(self, name, module=None):
        """Apply the patches of a module that has been imported. wrapt calls this as a post-import hook.

        Args:
            name: Name of the module.
            module: The module, which wrapt passes. It is not read.
        """
        with self._lock:
            self._watched.discard(name)  # wrapt calls a hook once
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
            # The module belongs to another framework. A binding feature is required only with its own.
            if progress.feature.binding:
                progress.required = False
            self._switch_off(progress, str(other), level=logging.DEBUG)
        except Misfit as misfit:
            self._switch_off(progress, str(misfit))
        except Exception as error:
            # A function of holmes (replace, version_of) failed, or the framework's source cannot be parsed.
            _log.debug("holmes: feature %s", progress.feature.name, exc_info=True)
            self._switch_off(progress, f"{type(error).__name__}: {error}", error)

    def _apply_ready_patches(self, progress, imported):
        """Apply the patches of a feature whose modules are imported, after checking all of its patches.

        Args:
            progress: State of the feature.
            imported: Name of a module whose import has just ended.

        Raises:
            _NotLoaded: the imported module belongs to another framework with the same module name.
            Misfit: the version is not supported, or a patch does not fit (raised by Location, too).
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
            location.check(patch)  # raises Misfit if the patch does not fit
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
        """Switch a feature off: remove its patches, and log the reason.

        Args:
            progress: State of the feature.
            reason: Why it cannot be used.
            cause: The exception that shows why, or None.
            level: Level of the log message.

        Raises:
            HolmesError: the feature is required.
        """
        self._remove(progress)
        progress.off, name = reason, progress.feature.name
        if progress.required:
            raise HolmesError(f"feature {name} cannot be used: {reason}") from cause
        _log.log(level, "holmes: feature %s is off: %s", name, reason)

    def _remove(self, progress):
        """Remove all patches of a feature that are applied, the last one first."""
        for patch, location in reversed(list(progress.applied.items())):
            location.remove(patch)
            if not location.patches:  # patches of other features may remain
                del self._locations[location.target]
        progress.applied.clear()


def _is_imported(name):
    """Return whether the import of a module has ended. Python sets `_initializing` during the import."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)
