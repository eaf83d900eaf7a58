"""What holmes patches in Lightning, and the version that it was run with."""

from holmes_ext.patches.engine.patch import Feature

RANKS = Feature("lightning-ranks", "lightning>=2.6", tried=("2.6.6",),
                what="Lightning takes the renumbered ranks")
