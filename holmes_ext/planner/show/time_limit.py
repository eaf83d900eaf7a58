"""Time limit of `holmes plan`: the moments at which search and output must end, so that it ends in time."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.simulated import framework_schedule_s
from holmes_ext.planner.search.stock import reasons
from holmes_ext.planner.show.start import step_without_plan_file
from holmes_ext.planner.simulate.deadline import simulations_until

#: Seconds in which the tables are drawn and the process ends.
OUTPUT_S = 0.4
#: Factor on the time of the simulations: those of a better plan, with more micro-batches, may take longer.
MARGIN = 1.5


@dataclass(frozen=True)
class TimeLimit:
    """Time limit of a command, counted from the start of its process."""

    end: float  # moment of time.monotonic()

    @classmethod
    def of_arguments(cls, args: argparse.Namespace) -> TimeLimit:
        """Create the time limit that --seconds sets."""
        begin = getattr(args, "begin", time.monotonic())  # main() sets it
        return cls(end=begin + args.seconds)

    @property
    def left_s(self) -> float:
        """Seconds until the end; never negative."""
        return max(0.0, self.end - time.monotonic())

    @property
    def simulations_end(self) -> float:
        """Moment of time.monotonic() at which the last simulations must have ended.

        These are the simulations of the best plan after the search, for the tables or for --json. The
        command needs OUTPUT_S after this moment to print.
        """
        return self.end - OUTPUT_S

    def share_until(self, end: float, share: float) -> float:
        """Return the moment of time.monotonic() after a share of the time from now to `end`."""
        now = time.monotonic()
        return now + share * max(0.0, end - now)

    def output_begin(self, result: SearchResult) -> float:
        """Return the moment of time.monotonic() at which the output must begin, so that it ends in time.

        The output needs some simulations of the best plan. To estimate their duration, the same
        simulations of the best plan so far are done here. If the search finds a better plan, the
        output simulates that plan, and takes about as long. Otherwise the result remembers the
        values, and the output simulates nothing.

        Args:
            result: First plans of the search.
        """
        begin = time.monotonic()
        with simulations_until(self.simulations_end):
            reasons(result)
            framework_schedule_s(result, result.best)
            step_without_plan_file(result)
        simulations_s = time.monotonic() - begin
        return self.end - MARGIN * simulations_s - OUTPUT_S
