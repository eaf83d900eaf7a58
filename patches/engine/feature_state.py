"""Records which patches of a feature are applied in this process, or why the feature is off."""

from __future__ import annotations

from holmes_ext.patches.engine.location import Location
from holmes_ext.patches.engine.patch import Feature, Patch

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
        self.applied: dict[Patch, Location] = {}  # applied patch -> the attribute that it changes
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
