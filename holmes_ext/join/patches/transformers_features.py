"""Feature that patches transformers for joined jobs, and the versions of transformers that were tested."""

from holmes_ext.patches.engine.patch import Feature

JOINED = Feature(
    "joined-transformers",
    "transformers>=4.51,<6",
    ("4.51.3", "4.57.1", "5.23.0"),
    "join",
    ("",),
    binding=True,
    what="joined jobs' Trainers read different parts of one data set",
)
