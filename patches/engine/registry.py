"""The registry: applies the patches of wanted features, undoes them exactly, and says what it did.

Features are all or nothing, but the modules they patch are imported one by one, and importing them early
would change the program. So a feature is judged three times, each time as far as can be known:

    enable()                        the installed distribution's version
    its first module is imported    every patch: version, target, parameters; of other modules by location.py
    each further module             the same once more, now on what was really imported

A misfit switches the whole feature off: what it had applied is undone, the reason is kept for statuses(), and
training goes on. If the user asked for the feature by name (required), HolmesError is raised instead, from
enable() or from the import. Nothing else escapes into an import.

Modules are only watched (wrapt's post-import hooks, which stay and find nothing to do after undo()).

Patches are in modules of holmes (PatchModule), which import much of holmes. The registry imports such a
module only if one of its features is on and the program imports the package that it patches. A finder at
the front of sys.meta_path notices that before the package's code runs.
"""

import functools
import logging
import os
import sys
import threading
from collections.abc import Iterable, Mapping

import wrapt

from holmes_ext import extensions, words
from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.patches.engine.imports import ImportObserver, is_imported
from holmes_ext.patches.engine.location import Location, Misfit, source_misfit
from holmes_ext.patches.engine.patch import Feature, Patch, PatchModule, PatchStatus
from holmes_ext.patches.engine.progress import UNWANTED, Progress
from holmes_ext.words import did_you_mean

_log = logging.getLogger(__name__)


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
    if name in words.RENAMED_FEATURES:
        return f"the feature {name!r} is called {words.RENAMED_FEATURES[name]!r} now"
    return f"there is no feature {name!r}; {did_you_mean(name, sorted(known))}"


class _NotLoaded(Exception):
    """The imported module belongs to another framework, which has a module of the same name.

    The feature is then switched off, and the user is not told.
    """


class Registry:
    """All patches (changes to frameworks), and the state of each in this process.

    Every public method may be called from any thread.
    """

    def __init__(
        self,
        patches: Iterable[Patch] = (),
        elsewhere: Iterable[str] = (),
        modules: Iterable[PatchModule] = (),
    ):
        """Collect patches, without applying any.

        Args:
            patches: The patches.
            elsewhere: Names of features whose patches may be added later. Until then they can be switched
                off, but not required.
            modules: Modules with more patches, which are imported when the patches are needed.
        """
        self._elsewhere = frozenset(elsewhere)
        self._lock = threading.RLock()
        self._features: dict[str, Progress] = {}
        self._locations: dict[str, Location] = {}  # by target, of the patches that are applied
        self._watched: set[str] = set()
        self._unloaded = list(modules)  # their patches are not in _features yet
        self._finder = ImportObserver(self._load_for_import)
        for module in self._unloaded:
            for feature in module.features:
                self._features.setdefault(feature.name, Progress(feature))
        self.add(patches)

    def add(self, patches: Iterable[Patch]) -> None:
        """Add patches, without applying them.

        Patches that were added before are left out.

        Raises:
            ValueError: two patches of a feature have the same target, or two features have the same name.
        """
        for patch in patches:
            name, target = patch.feature.name, patch.target
            progress = self._features.setdefault(name, Progress(patch.feature))
            if any(patch is other for other in progress.patches):
                continue
            if patch.feature != progress.feature or target in [
                other.target for other in progress.patches
            ]:
                raise ValueError(f"{name}: {target} is given twice, or in two features of one name")
            progress.patches.append(patch)

    def enable(
        self, names: Iterable[str], required: bool = False, disabled: frozenset[str] | None = None
    ) -> None:
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
                raise HolmesError(
                    f"feature {name} belongs to an extension that this job does not use"
                )
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
                progress.off, progress.begun = (
                    None,
                    False,
                )  # it is on from now on, without applied patches
                # With version_of, the version is known only after the import (_apply_ready_patches).
                if not progress.feature.version_of:
                    progress.version = progress.feature.installed()
                    if reason := progress.misfit():  # why the version is not supported
                        # No warning is needed: the line that holmes prints at the start has the reason.
                        self._switch_off(progress, reason, level=logging.INFO)
                        continue
            self._load_imported(progress.feature)
            # A module whose import has begun may lack functions, so patches cannot be judged.
            half_imported = [
                module
                for module in progress.modules
                if module in sys.modules and not is_imported(module)
            ]
            if half_imported:
                reason = f"{half_imported[0]} is just being imported: enable holmes before"
                with self._lock:
                    self._switch_off(progress, reason, level=logging.INFO)
                continue
            self._watch_all(progress)

    def _load_imported(self, feature: Feature) -> None:
        """Import the modules with patches of a feature if the program has imported what they patch.

        The other modules follow when the program imports it.
        """
        with self._lock:
            modules = [module for module in self._unloaded if feature in module.features]
        imported = [module for module in modules if module.package in sys.modules]
        self._load(imported)
        if len(imported) < len(modules) and self._finder not in sys.meta_path:
            sys.meta_path.insert(0, self._finder)

    def _load_for_import(self, name: str) -> None:
        """Import the modules with patches that the program needs from now on.

        ImportObserver calls this.

        Args:
            name: Name of a module, e.g. "deepspeed", whose import begins.

        Raises:
            HolmesError: a module of holmes cannot be imported, and a feature of it is required.
        """
        with self._lock:
            modules = [
                module
                for module in self._unloaded
                if f"{name}.".startswith(f"{module.package}.") and self._is_used(module)
            ]
        try:
            self._load(modules)
        except Exception as error:  # a fault of holmes must not end the program's import
            _log.debug("holmes: patches for %s", name, exc_info=True)
            with self._lock:
                for progress in self._on_features_of(modules):
                    self._switch_off(progress, f"{type(error).__name__}: {error}", error)
        for progress in self._on_features_of(modules):
            self._watch_all(progress)

    def _is_used(self, module: PatchModule) -> bool:
        """Return whether a feature of a module with patches is on."""
        return any(self.is_on(feature.name) for feature in module.features)

    def _on_features_of(self, modules: Iterable[PatchModule]) -> list[Progress]:
        """Return the features that are on and have patches in some modules."""
        names = dict.fromkeys(feature.name for module in modules for feature in module.features)
        return [self._features[name] for name in names if self.is_on(name)]

    def _load(self, modules: Iterable[PatchModule]) -> None:
        """Import modules of holmes, and add their patches.

        The caller must not hold the lock: another thread that imports such a module may wait for the lock.
        """
        for module in modules:
            patches = extensions.load(module.name).PATCHES
            with self._lock:
                self.add(patches)
                if module in self._unloaded:
                    self._unloaded.remove(module)

    def _watch_all(self, progress: Progress) -> None:
        """Apply the patches of a feature, now or when their modules are imported."""
        for module in progress.modules:
            self._watch(module)

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
                    f"--holmes-require {name}: it is used with {feature.asked_by}; give that too"
                )
        wanted = [
            progress.feature for name, progress in self._features.items() if name not in required
        ]
        # A framework with version_of may have no package, so installed() does not find it.
        self.enable(
            feature.name
            for feature in wanted
            if feature.asked_for(options) and (feature.version_of or feature.installed())
        )
        for progress in self._features.values():
            # The job ends if the framework of a binding feature is imported later and a patch does not fit.
            progress.required |= progress.feature.binding and progress.off is None

    def undo(self) -> None:
        """Remove every patch. Each changed attribute, and each copy of it, gets its original value again.

        An attribute that its class had inherited is deleted from the class.
        """
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
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
        """Return the state of every patch, in the order of registration within each feature.

        All modules with patches are imported.
        """
        with self._lock:
            modules = list(self._unloaded)
        self._load(modules)
        for progress in self._on_features_of(modules):
            self._watch_all(progress)
        with self._lock:
            return [
                PatchStatus(
                    name,
                    patch.target,
                    progress.state(patch),
                    progress.off or patch.reason,
                    progress.version,
                )
                for name, progress in self._features.items()
                for patch in progress.patches
            ]

    def summary(self) -> tuple[list[str], dict[str, str]]:
        """Return the features that are on, and those that were wanted but are off, with the reason.

        A feature with version_of counts as on only after its first patches are applied: before the import it
        is not known whether its framework is there.
        """
        with self._lock:
            on = [
                name
                for name, progress in self._features.items()
                if progress.off is None and (progress.applied or not progress.feature.version_of)
            ]
            return on, {
                name: progress.off
                for name, progress in self._features.items()
                if progress.off and progress.off != UNWANTED
            }

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
            texts = {
                progress.feature.beyond_tried(progress.version)
                for progress in self._features.values()
                if progress.off is None and not progress.untried
            }
            return sorted(texts - {""})

    def states(self) -> dict[str, str]:
        """Return the state of each feature, "off" or "on VERSION". It is equal on ranks patched alike.

        A feature whose patches wait for an import counts as on, since a rank may import a module later than
        another. A feature with version_of is left out until its framework is imported: before, its state is
        not certain.
        """
        with self._lock:
            return {
                name: "off" if progress.off else f"on {progress.version}"
                for name, progress in self._features.items()
                if progress.off or progress.version or not progress.feature.version_of
            }

    def _watch(self, name):
        """Let _imported() run for a module: at once if the module is imported, or else after its import.

        The caller must not hold the lock, since wrapt may call _imported() at once.
        """
        with self._lock:
            was_watched = name in self._watched
            self._watched.add(name)
        if not was_watched:
            wrapt.register_post_import_hook(functools.partial(self._imported, name), name)
        elif is_imported(name):
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
        ready = [
            patch for patch in pending if patch.module == imported or is_imported(patch.module)
        ]
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
