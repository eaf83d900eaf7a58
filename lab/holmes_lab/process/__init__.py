"""The lab's processes: the keeper, launchers, ranks, preloaded interpreters."""
