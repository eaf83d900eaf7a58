"""Time limit of `holmes plan`: when the search has to stop so that the command ends in time."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.simulated import simulated
from holmes_ext.planner.show.start import step_without_plan_file

#: Simulated steps that the output needs: the seconds by cause of the best plan, the user's layout and the
#: job without holmes, the step with the framework's schedule, and the baselines.
OUTPUT_STEPS = 8
#: Seconds in which the tables are drawn and the process ends.
OUTPUT_S = 0.15


@dataclass(frozen=True)
class TimeLimit:
    """Time limit of a command, counted from the start of its process."""

    end: float  # moment of time.monotonic()

    @classmethod
    def of_arguments(cls, args: argparse.Namespace) -> TimeLimit:
        """Return the limit of --seconds."""
        begin = getattr(args, "begin", time.monotonic())  # main() sets it
        return cls(end=begin + args.seconds)

    @property
    def left_s(self) -> float:
        """Seconds until the end; never negative."""
        return max(0.0, self.end - time.monotonic())

    def share_until(self, end: float, share: float) -> float:
        """Return the moment of time.monotonic() after a share of the time from now to `end`."""
        now = time.monotonic()
        return now + share * max(0.0, end - now)

    def output_begin(self, result: SearchResult) -> float:
        """Return the moment of time.monotonic() at which the output must begin, so that it ends in time.

        Args:
            result: First plans of the search. The best of them shows how long the simulations and
                the order of nodes, which the output needs, will take.
        """
        begin = time.monotonic()
        simulated(result, result.best)
        simulation_s = time.monotonic() - begin
        begin = time.monotonic()
        step_without_plan_file(result)
        order_s = time.monotonic() - begin
        return self.end - OUTPUT_STEPS * simulation_s - order_s - OUTPUT_S
