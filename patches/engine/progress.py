"""Holds how far the patches of a feature are applied in this process."""

from __future__ import annotations

from holmes_ext.patches.engine.location import Location
from holmes_ext.patches.engine.patch import Feature, Patch

#: Why a feature is off that nobody has asked for. The user is not told about it.
UNWANTED = "not enabled"


class Progress:
    """State of a feature: a group of patches of a framework, which are all applied or not at all."""

    def __init__(self, feature: Feature):
        self.feature = feature
        self.patches: list[Patch] = []
        # Whether an error is raised if a patch does not fit the framework; else the feature is switched off.
        self.required = False
        self.begun = False  # whether the first patches are applied; others may wait for an import
        self.anyway = False  # used under a version that was not tried, if all of its patches fit
        self.off: str | None = UNWANTED  # why it is off; None while it is on
        self.applied: dict[Patch, Location] = {}
        self.version: str | None = None  # of the framework, as installed

    @property
    def modules(self) -> list[str]:
        """Return the names of the framework's modules that the patches change."""
        return sorted({patch.module for patch in self.patches})

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
