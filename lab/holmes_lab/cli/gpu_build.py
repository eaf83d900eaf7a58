"""How far the build of the emulated GPU is: a bar on a terminal, some lines elsewhere."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_TITLE = "holmes lab: building the emulated GPU, once"
_LINES = 10  # in all, where there is no terminal


class BuildProgress:
    """A context manager; its call is a build's OnProgress. Shows nothing where nothing is built."""

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
        """total 0: `what` alone is told."""
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
        part = done * _LINES // total if total else -1
        if part != self._shown or not total:
            self._shown = part
            print(
                f"{_TITLE}: {f'{done} of {total}' if total else what}", file=sys.stderr, flush=True
            )
