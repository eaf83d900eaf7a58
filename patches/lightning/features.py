"""Lists the features (groups of patches) of holmes for Lightning, with the versions they support."""

from holmes_ext.patches.engine.patch import Feature

RANKS = Feature(
    "lightning-ranks",
    "lightning>=2.0",
    tried=("2.5.1", "2.6.6"),
    read=("2.0.0", "2.3.0"),
    what="Lightning takes the renumbered ranks",
)

#: Module of this package -> the features of its patches.
MODULES = {"ranks": (RANKS,)}
