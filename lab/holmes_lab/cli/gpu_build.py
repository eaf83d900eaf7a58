"""Progress of the build of the emulated GPU: a bar on a terminal, a few lines in other output."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_TITLE = "holmes lab: building the emulated GPU, once"
_LINES = 10  # printed lines of a whole build if stderr is no terminal


class BuildProgress:
    """Progress on stderr. The object is a context manager, and is called when the build advances.

    Nothing is shown if nothing has to be built.
    """

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task(_TITLE, total=None)
        self._shown = -1

    def __enter__(self) -> BuildProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar.live.is_started:
            self._bar.stop()

    def __call__(self, done: int, total: int, what: str) -> None:
        """Show the progress.

        Args:
            done: Number of finished parts.
            total: Number of all parts; 0: only `what` is shown.
            what: Description of the current part.
        """
        if not sys.stderr.isatty():
            self._line(done, total, what)
            return
        self._bar.start()
        if total:
            self._bar.update(
                self._task, completed=done, total=total, description=f"{_TITLE}: {what:.40}"
            )
        else:
            self._bar.update(self._task, description=f"{_TITLE}: {what}")

    def _line(self, done: int, total: int, what: str) -> None:
        """Print a line if another tenth of the build is finished, or if there is no total."""
        part = done * _LINES // total if total else -1
        if part != self._shown or not total:
            self._shown = part
            print(
                f"{_TITLE}: {f'{done} of {total}' if total else what}", file=sys.stderr, flush=True
            )
