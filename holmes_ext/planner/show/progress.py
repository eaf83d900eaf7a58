"""Progress bar of `holmes plan`, on standard error and on a terminal only."""

from __future__ import annotations

import time
from math import inf

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

#: Seconds of silence before the progress bar shows.
SILENCE_S = 1.0


class ProgressBar(Progress):
    """Progress bar of the time limit, with the best step so far."""

    def __init__(self, seconds: float, quiet: bool):
        """Create a progress bar; it is not shown before the first update.

        Args:
            seconds: Time limit; the bar is full when it is over.
            quiet: Never show it.
        """
        console = Console(stderr=True)
        may_show = console.is_terminal and not quiet
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("of {task.total:.0f} s at most"),
            console=console,
            transient=True,  # the bar disappears at the end
            disable=not may_show,
        )
        self.begin = time.monotonic()
        self.task = self.add_task("searching", total=seconds, visible=False)

    def on_progress(self, done: int, left: int, best: float, gap: float) -> None:
        """Update the bar; the search calls this from time to time.

        Args:
            done: Items of the search that were examined.
            left: Items that are left.
            best: Best step so far, in seconds; inf before the first.
            gap: Largest fraction of that step that another plan could save; 1 before a step was
                simulated.
        """
        if best == inf:
            text = f"searching, {done} of {done + left} sizes"
        else:
            text = f"best so far {best:.4g} s"
        if gap < 1:
            text += f", simulated; at most {gap:.1%} can be saved"
        elapsed_s = time.monotonic() - self.begin
        visible = elapsed_s > SILENCE_S
        self.update(self.task, description=text, completed=elapsed_s, visible=visible)
