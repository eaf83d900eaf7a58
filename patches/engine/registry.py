"""Applies patches (changes of holmes to a framework's functions) when their modules are imported.

The patches of a feature are all applied, or none. But the program imports the framework's modules at
different times, and holmes must not import them early. So the registry checks a feature up to three times:

    1. enable() is called                               the version of the installed package
    2. the first module that it patches is imported     every patch: its version, function and parameters.
                                                        Modules that are not imported are checked by their
                                                        source (location.py). Then the first patches are
                                                        applied.
    3. each other module that it patches is imported    the patches of this module, before they are applied

If a check fails, the feature is switched off: the patches that were applied are removed, statuses() returns
the reason, and training goes on. If the feature is required (--holmes-require), enable() or the program's
import statement raises HolmesError instead. No other exception is raised in an import of the program.

wrapt's post-import hooks report the end of an import. They stay registered after undo(), and then do nothing.

The patches are in modules of holmes (PatchModule). These import much of holmes. The registry imports such a
module only if one of its features is on and the program imports the package that it patches. A finder at
the front of sys.meta_path (ImportObserver) reports that import before the package's code runs.
"""

import functools
import logging
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import wrapt

from holmes_ext import extensions, words
from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.patches.engine.location import (
    ImportObserver,
    Location,
    Misfit,
    is_imported,
    source_misfit,
)
from holmes_ext.patches.engine.patch import (
    UNWANTED,
    Feature,
    FeatureState,
    Patch,
    PatchModule,
    PatchStatus,
)
from holmes_ext.words import did_you_mean

_log = logging.getLogger(__name__)


def disabled_features(environ: Mapping[str, str], known: Iterable[str]) -> frozenset[str]:
    """Return the features that the variable HOLMES_DISABLE, e.g. "ddp,fsdp", switches off.

    Args:
        environ: Environment variables.
        known: Names of all features, for the value "all".

    Raises:
        HolmesError: HOLMES_DISABLE names a feature that does not exist. The message names a similar one.
    """
    return _features_named("HOLMES_DISABLE", environ.get("HOLMES_DISABLE", ""), known)


def _features_named(source: str, text: str, known: Iterable[str]) -> frozenset[str]:
    """Return the features that a comma-separated list names.

    Args:
        source: The option or variable that has the list, for the error message.
        text: The list, e.g. "ddp,fsdp".
        known: Names of all features, for the value "all".

    Raises:
        HolmesError: the list names a feature that does not exist. The message names a similar one.
    """
    known_names = set(known)
    names = {name.strip() for name in text.split(",")} - {""}
    unknown_names = sorted(names - known_names - {"all"})
    if unknown_names:
        message = _message_of_unknown_feature(unknown_names[0], {*known_names, "all"})
        raise HolmesError(f"{source}: {message}")
    if "all" in names:
        return frozenset(known_names)
    return frozenset(names)


def _message_of_unknown_feature(name: str, known: Iterable[str]) -> str:
    if name in words.RENAMED_FEATURES:
        return f"the feature {name!r} is called {words.RENAMED_FEATURES[name]!r} now"
    return f"there is no feature {name!r}; {did_you_mean(name, sorted(known))}"


class _OtherFrameworkError(Exception):
    """The imported module belongs to another framework that has a module of the same name.

    The feature is then switched off without a warning.
    """


class FeatureSummary(NamedTuple):
    """Features that a job uses, and features that were enabled but are off."""

    on: list[str]
    off: dict[str, str]  # name -> why the feature is off


class Registry:
    """All patches of holmes, grouped by feature, and their state in this process.

    A patch is a change to a function of a framework. Every public method may be called from any thread.
    """

    def __init__(
        self,
        patches: Iterable[Patch] = (),
        extension_features: Iterable[str] = (),
        modules: Iterable[PatchModule] = (),
    ):
        """Collect patches (changes of holmes to frameworks), without applying any.

        Args:
            patches: Patches that are imported already.
            extension_features: Names of the features of all extensions (packages that extend
                holmes). HOLMES_DISABLE may name these features in every job. add() adds their
                patches, but only in jobs that use the extension. In other jobs, enable() raises an
                error for such a feature.
            modules: Modules of holmes with more patches. They are imported when the patches are
                needed. Unlike an extension's, their features can be enabled before that.
        """
        self._extension_features = frozenset(extension_features)
        self._lock = threading.RLock()
        #: Name of a feature -> its state.
        self._states: dict[str, FeatureState] = {}
        #: "module:qualname" -> the attribute of this name, with the patches that are applied to it.
        self._locations: dict[str, Location] = {}
        #: Modules of frameworks: wrapt will call a post-import hook after the import of each.
        self._watched_modules: set[str] = set()
        #: Modules of holmes with patches that are not imported yet.
        self._unloaded_modules = list(modules)
        self._import_observer = ImportObserver(self._import_patches_before)
        for module in self._unloaded_modules:
            for feature in module.features:
                self._states.setdefault(feature.name, FeatureState(feature))
        self.add(patches)

    def add(self, patches: Iterable[Patch]) -> None:
        """Add patches (changes of holmes to frameworks), without applying them.

        A patch that was added before is left out.

        Raises:
            ValueError: two patches of a feature have the same target, or two features have the same name.
        """
        for patch in patches:
            name = patch.feature.name
            state = self._states.setdefault(name, FeatureState(patch.feature))
            if any(patch is other for other in state.patches):
                continue  # added before
            has_same_target = any(patch.target == other.target for other in state.patches)
            if has_same_target or patch.feature != state.feature:
                raise ValueError(
                    f"{name}: {patch.target} is given twice, or in two features of one name"
                )
            state.patches.append(patch)

    def enable(
        self, names: Iterable[str], required: bool = False, disabled: frozenset[str] | None = None
    ) -> None:
        """Apply the patches of some features (groups of patches), now or later.

        A patch changes a module of a framework. It is applied now if the program has imported that
        module, or else when the program imports the module.

        Args:
            names: Names of the features.
            required: Whether a patch that does not fit the framework is an error. HolmesError is
                then raised by this method, or later by the program's import of the module. If
                False, the feature is switched off, and no error is raised.
            disabled: Features that stay off; by default those in HOLMES_DISABLE.

        Raises:
            HolmesError: a feature does not exist, or a required feature does not fit.
        """
        names = list(names)
        if disabled is None:
            disabled = self.switched_off()
        for name in names:
            if name in self._states:
                continue
            if name in self._extension_features:
                raise HolmesError(
                    f"feature {name} belongs to an extension that this job does not use"
                )
            raise HolmesError(_message_of_unknown_feature(name, self._known_names()))
        for name in names:
            self._enable_feature(self._states[name], required, is_disabled=name in disabled)

    def _enable_feature(self, state: FeatureState, required: bool, is_disabled: bool) -> None:
        """Apply the patches of one feature, now or when their modules are imported (see enable).

        A feature is a group of patches (changes to a framework). It is on while its off_reason is
        None. Otherwise off_reason says why it is off:

        - HOLMES_DISABLE names the feature.
        - The framework's version is not supported, or a patch does not fit.
        - A module of the framework is being imported right now.

        Args:
            state: State of the feature.
            required: Whether a patch that does not fit the framework raises HolmesError. If False,
                the feature is switched off instead.
            is_disabled: Whether HOLMES_DISABLE switches the feature off.
        """
        with self._lock:
            if is_disabled:
                self._remove(state)  # an earlier call may have applied its patches
                state.off_reason = "switched off by HOLMES_DISABLE"
                return
            state.is_required |= required
            if state.off_reason is None:
                return  # an earlier call has enabled it
            state.off_reason = None  # the feature is on from here
            state.has_begun = False  # no patch of it is applied yet
            # With version_of, the version is known only after the import (_apply_ready_patches).
            if not state.feature.version_of:
                state.version = state.feature.installed()
                reason = state.misfit()  # None if the version is supported
                if reason:
                    # No warning is needed: the line that holmes prints at the start has the reason.
                    self._switch_off(state, reason, level=logging.INFO)
                    return

        # If the framework is imported already: import the modules of holmes that define patches.
        self._import_needed_patches(state.feature)
        for module in state.modules:  # the framework's modules that the patches change
            # A module is in sys.modules once its import begins. is_imported(): that has ended.
            if module in sys.modules and not is_imported(module):
                # The module may still lack functions, so patches cannot be checked.
                reason = f"{module} is being imported; enable holmes before its import"
                with self._lock:
                    self._switch_off(state, reason, level=logging.INFO)
                return
        self._apply_patches_when_imported(state)

    def _import_needed_patches(self, feature: Feature) -> None:
        """Import the modules of holmes with patches of a feature, if they are needed already.

        A module is needed as soon as the program has imported the package that it patches. If others may be
        needed later, the program's imports are observed from now on.
        """
        with self._lock:
            modules = [module for module in self._unloaded_modules if feature in module.features]
        needed_now = [module for module in modules if module.package in sys.modules]
        self._import_patches(needed_now)
        has_more = len(needed_now) < len(modules)
        if has_more and self._import_observer not in sys.meta_path:
            sys.meta_path.insert(0, self._import_observer)

    def _import_patches_before(self, name: str) -> None:
        """Import the modules of holmes that patch a package, since the program begins to import the package.

        ImportObserver calls this method at the beginning of each import.

        Args:
            name: Name of the module that the program imports, e.g. "deepspeed".

        Raises:
            HolmesError: a module of holmes cannot be imported, and one of its features is required.
        """
        modules = []
        with self._lock:
            for module in self._unloaded_modules:
                # True for "torch.distributed" if the patched package is "torch".
                is_inside = f"{name}.".startswith(f"{module.package}.")
                if is_inside and self._has_feature_on(module):
                    modules.append(module)
        try:
            self._import_patches(modules)
        except Exception as error:  # a fault of holmes must not end the program's import
            _log.debug("holmes: patches for %s", name, exc_info=True)
            with self._lock:
                for state in self._enabled_features_of(modules):
                    self._switch_off(state, f"{type(error).__name__}: {error}", error)
        for state in self._enabled_features_of(modules):
            self._apply_patches_when_imported(state)

    def _has_feature_on(self, module: PatchModule) -> bool:
        """Return whether a module of holmes has patches for at least one feature that is on."""
        return any(self.is_on(feature.name) for feature in module.features)

    def _enabled_features_of(self, modules: Iterable[PatchModule]) -> list[FeatureState]:
        """Return the states of the features that are on and have patches in some modules."""
        names: dict[str, None] = {}  # a set that keeps its order
        for module in modules:
            for feature in module.features:
                names[feature.name] = None
        return [self._states[name] for name in names if self.is_on(name)]

    def _import_patches(self, modules: Iterable[PatchModule]) -> None:
        """Import modules of holmes that define patches, and add these patches to the registry.

        The caller must not hold the lock: another thread that imports such a module may wait for the lock.
        """
        for module in modules:
            patches = extensions.load(module.name).PATCHES  # imports the module
            with self._lock:
                self.add(patches)
                if module in self._unloaded_modules:
                    self._unloaded_modules.remove(module)

    def _apply_patches_when_imported(self, state: FeatureState) -> None:
        """Apply each patch of a feature, now or when the module that it changes is imported."""
        for module in state.modules:
            self._apply_patches_after_import_of(module)

    def enable_for_options(self, options: Options) -> None:
        """Enable the features (groups of patches) that a job with these options uses.

        - By default a feature is left out if its framework is not installed. It is switched off if
          a patch does not fit the framework.
        - A feature in options.required_features (--holmes-require) must be used: otherwise an
          error is raised.
        - A feature in options.try_ (--holmes-try) is used under any version of its framework.

        Raises:
            HolmesError: an option names a feature that does not exist. Or a required feature cannot
                be used: its framework is not installed, a patch does not fit, or another option
                leaves the feature off.
        """
        for name in _features_named("--holmes-try", options.try_, self._known_names()):
            # A feature without a state belongs to an extension that this job does not use.
            if name in self._states:
                self._states[name].is_forced = True
        required = set(options.required_features)
        self.enable(required, required=True)
        for name in sorted(required):
            feature = self._states[name].feature
            # False if the option that the feature needs is missing, e.g. --holmes-overlap.
            if not feature.is_enabled_by(options):
                # feature.switch is the option to pass, such as "--holmes-overlap auto or on".
                raise HolmesError(
                    f"--holmes-require {name} has no effect without {feature.switch}; pass that too"
                )

        optional = []
        for name, state in self._states.items():
            feature = state.feature
            if name in required or not feature.is_enabled_by(options):
                continue
            # installed() looks for a package of the framework. A framework that runs from a source tree
            # has none: only after its import, version_of() finds out whether it is there.
            may_be_there = feature.version_of is not None or feature.installed() is not None
            if may_be_there:
                optional.append(name)
        self.enable(optional)
        for state in self._states.values():
            # A job must not run without a binding feature (Feature.binding). For example, a job
            # that is to be joined with others would train alone. With is_required, the job ends
            # with an error if the framework is imported later and a patch does not fit.
            if state.feature.binding and state.off_reason is None:
                state.is_required = True

    def undo(self) -> None:
        """Remove every patch (change to a framework), and switch all features off.

        Each changed attribute, and each copy of it, gets its original value again. An attribute that its
        class had inherited is deleted from the class.
        """
        if self._import_observer in sys.meta_path:
            sys.meta_path.remove(self._import_observer)
        with self._lock:
            for state in self._states.values():
                self._remove(state)
                if state.off_reason is None:
                    state.off_reason = "undone"
                state.is_required = False
                state.is_forced = False

    def switched_off(self) -> frozenset[str]:
        """Return the features that the environment variable HOLMES_DISABLE switches off."""
        return disabled_features(os.environ, self._known_names())

    def _known_names(self) -> list[str]:
        """Return the names of all features, of holmes and of its extensions, as options may give them."""
        without_duplicates = dict.fromkeys([*self._states, *self._extension_features])
        return list(without_duplicates)

    def is_on(self, name: str) -> bool:
        """Return whether a feature is on: its patches (changes to a framework) are applied or wait."""
        return self._states[name].off_reason is None

    def statuses(self) -> list[PatchStatus]:
        """Return the state of every patch (change to a framework), in the order of registration by feature.

        Most patches are defined in modules of holmes that are imported only when the program
        imports their framework. This method imports all these modules first, so that no patch is
        missing. It imports no module of a framework.
        """
        with self._lock:
            modules = list(self._unloaded_modules)  # of holmes, not imported yet
        self._import_patches(modules)
        for state in self._enabled_features_of(modules):
            self._apply_patches_when_imported(state)
        statuses = []
        with self._lock:
            for name, state in self._states.items():
                for patch in state.patches:
                    status = PatchStatus(
                        feature=name,
                        target=patch.target,
                        state=state.state_of(patch),
                        reason=state.off_reason or patch.reason,
                        version=state.version,
                    )
                    statuses.append(status)
        return statuses

    def summary(self) -> FeatureSummary:
        """Return the features (groups of patches) that the job uses, and those that it wanted but are off.

        Two kinds of features are in neither list:

        - Features that were never enabled.
        - Features whose framework is not imported yet, if its version can be read only after the
          import (Feature.version_of): until then, it is not certain that the framework is there.
        """
        summary = FeatureSummary(on=[], off={})
        with self._lock:
            for name, state in self._states.items():
                if state.off_reason is None:
                    if state.applied or not state.feature.version_of:
                        summary.on.append(name)
                elif state.off_reason != UNWANTED:  # UNWANTED: it was never enabled
                    summary.off[name] = state.off_reason
        return summary

    def untried(self) -> dict[str, list[str]]:
        """Return the features that are on although they do not support the framework's version.

        The option --holmes-try switches such features on, if their patches fit the framework's
        code. "Untried" means that holmes was not tested with this version.

        Returns:
            A dict: framework and version, e.g. "deepspeed 0.20.0" -> names of the features.
        """
        by_version: dict[str, list[str]] = {}
        with self._lock:
            for name, state in self._states.items():
                if state.is_untried:
                    version = f"{state.feature.requirement.name} {state.version}"
                    by_version.setdefault(version, []).append(name)
        return by_version

    def warnings_of_newer_frameworks(self) -> list[str]:
        """Return a warning for each framework that is newer than all versions holmes was run with.

        Only frameworks with a feature that is on are checked. Features that --holmes-try has
        switched on in an unsupported version are left out: untried() returns them.
        """
        warnings = set()  # several features of a framework may have the same warning
        with self._lock:
            for state in self._states.values():
                if state.off_reason is None and not state.is_untried:
                    warnings.add(state.feature.warning_if_newer_than_tried(state.version))
        return sorted(warnings - {""})

    def states(self) -> dict[str, str]:
        """Return the state of each feature (group of patches), "off" or "on VERSION".

        VERSION is that of the framework. Ranks compare these states before the job starts, so ranks with the
        same patches must return the same. A feature whose patches wait for an import counts as on, because a
        rank may import a module later than another.

        A feature that is on is left out as long as the version is not known. That is so before the import of
        a framework whose version cannot be read from an installed package (Feature.version_of).
        """
        states = {}
        with self._lock:
            for name, state in self._states.items():
                if state.off_reason:
                    states[name] = "off"
                elif state.version is not None:
                    states[name] = f"on {state.version}"
        return states

    def _apply_patches_after_import_of(self, name: str) -> None:
        """Apply the patches of a framework's module: now if it is imported, else after its import.

        wrapt's post-import hook does both: it runs at once if the module is imported already. This
        method registers no second hook for a module that already waits for its import.

        The caller must not hold self._lock. wrapt has a lock of its own, and two threads that take
        both locks in different orders could deadlock.

        Args:
            name: Name of the framework's module.
        """
        with self._lock:
            has_hook = name in self._watched_modules  # a hook that wrapt has not called yet
            self._watched_modules.add(name)
        if not has_hook:
            hook = functools.partial(self._apply_patches_of, name)
            wrapt.register_post_import_hook(hook, name)
            return
        if is_imported(name):
            # wrapt has missed the import, e.g. because a program has set sys.modules[name] itself.
            self._apply_patches_of(name)

    def _apply_patches_of(self, name: str, module: Any = None) -> None:
        """Apply the patches of a module that has been imported.

        wrapt calls this method as a post-import hook.

        Args:
            name: Name of the framework's module.
            module: The module, as wrapt passes it. It is not read.
        """
        with self._lock:
            self._watched_modules.discard(name)  # wrapt calls a hook once
            for state in self._states.values():
                is_on = state.off_reason is None
                if is_on and name in state.modules:
                    self._apply_or_switch_off(state, name)

    def _apply_or_switch_off(self, state: FeatureState, imported: str) -> None:
        """Apply the patches of a feature whose modules are imported, or switch the feature off.

        The feature is switched off if one of its patches does not fit the framework, or if the
        imported module belongs to another framework with modules of the same names (e.g. two
        packages `megatron`).

        Args:
            state: State of the feature.
            imported: Name of a module whose import has just ended.

        Raises:
            HolmesError: the feature would be switched off, but the job must not run without it
                (state.is_required).
        """
        try:
            self._apply_ready_patches(state, imported)
        except _OtherFrameworkError as error:
            # A feature is required for one of two reasons. If --holmes-require names it,
            # _switch_off() raises an error. If it is binding, only a job of its own framework must
            # not run without it. This job of another framework goes on, so no error may be raised.
            if state.feature.binding:
                state.is_required = False
            self._switch_off(state, str(error), level=logging.DEBUG)
        except Misfit as misfit:
            self._switch_off(state, str(misfit))
        except Exception as error:
            # A function of holmes (replace, version_of) failed, or the framework's source cannot be parsed.
            _log.debug("holmes: feature %s", state.feature.name, exc_info=True)
            self._switch_off(state, f"{type(error).__name__}: {error}", error)

    def _apply_ready_patches(self, state: FeatureState, imported: str) -> None:
        """Check all patches of a feature, and apply those whose modules are imported.

        Args:
            state: State of the feature.
            imported: Name of a module whose import has just ended.

        Raises:
            _OtherFrameworkError: the imported module belongs to another framework.
            Misfit: the version is not supported, or a patch does not fit.
        """
        if state.feature.version_of:  # the version can be read only after the import
            state.version = state.feature.version_of()
            if state.version is None:
                raise _OtherFrameworkError(
                    f"the imported module is not of {state.feature.requirement.name}"
                )
            reason = state.misfit()  # why the version is not supported
            if reason:
                raise Misfit(reason)

        # Patches that are not applied yet: `ready` are those whose module is imported, the others wait.
        pending = [
            patch
            for patch in state.patches
            if patch not in state.applied and patch.is_for_version(state.version)
        ]
        ready = [
            patch for patch in pending if patch.module == imported or is_imported(patch.module)
        ]
        locations = dict(self._locations)  # all patches of one attribute share its Location
        for patch in ready:
            if patch.target not in locations:
                locations[patch.target] = Location(patch)
            locations[patch.target].check(patch)  # raises Misfit if the patch does not fit
        if not state.has_begun:
            # Before the first patch is applied, those that wait are checked, too: in the source code.
            waiting = [patch for patch in pending if patch not in ready]
            for patch in waiting:
                reason = source_misfit(patch)
                if reason:
                    raise Misfit(reason)
        state.has_begun = True  # the check of the source code is made once
        for patch in ready:
            location = locations[patch.target]
            location.add(patch)
            self._locations[patch.target] = location
            state.applied.append(patch)

    def _switch_off(
        self,
        state: FeatureState,
        reason: str,
        cause: Exception | None = None,
        level: int = logging.WARNING,
    ) -> None:
        """Switch a feature off: remove its patches, and log the reason.

        Args:
            state: State of the feature.
            reason: Why it cannot be used.
            cause: The exception that shows why, or None.
            level: Level of the log message.

        Raises:
            HolmesError: the feature is required.
        """
        self._remove(state)
        state.off_reason = reason
        name = state.feature.name
        if state.is_required:
            raise HolmesError(f"feature {name} cannot be used: {reason}") from cause
        _log.log(level, "holmes: feature %s is off: %s", name, reason)

    def _remove(self, state: FeatureState) -> None:
        """Undo all applied patches (changes to a framework) of a feature, the last one first."""
        for patch in reversed(state.applied):
            location = self._locations[patch.target]
            location.remove(patch)
            if not location.patches:  # patches of other features may remain
                del self._locations[location.target]
        state.applied.clear()
