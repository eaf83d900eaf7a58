"""Processes of the lab: the keeper, launchers, ranks and preloaded Pythons."""
