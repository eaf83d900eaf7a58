"""What holmes patches in transformers, and the version that it was run with."""

from holmes_ext.patches.engine.patch import Feature

JOINED = Feature("joined-transformers", "transformers>=5.23,<6", ("5.23.0",), "join", ("",), binding=True,
                 what="joined jobs' Trainers read different parts of one data set")
