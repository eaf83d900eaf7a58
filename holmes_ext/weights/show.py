"""Output of `holmes weights` on a terminal: the table of receiving hosts, and the progress of a transfer."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.join.sockets.handshake import printable
from holmes_ext.units import format_bytes, format_rate
from holmes_ext.weights.receiver import VersionTransfer, WeightsReceiver
from holmes_ext.words import counted

COLUMNS = (
    Column("site"),
    Column("host"),
    Column("in use", right=True),
    Column("complete", right=True),
    Column("arriving", right=True),
    Column("rate", right=True, drop=1),
    Column("lag", right=True),
    Column("over the WAN", right=True, drop=2),
    Column("from the site", right=True, drop=3),
    Column("heard, s ago", right=True, drop=4),
)
#: Seconds between two updates of the progress bar.
_UPDATE_S = 0.2


def show_status(status: dict[str, Any]) -> None:
    """Print the published versions, and a table with a row for each host that receives them.

    Args:
        status: The document that `holmes weights status --json` prints.
    """
    versions = status["versions"]
    title = f"{counted(len(versions), 'version')} published"
    if versions:
        title += f", the newest is {versions[-1]}; {_committed_text(status['current'], status['wanted'])}"
    Screen().table(COLUMNS, [_row(host, versions) for host in status["hosts"]], title=title)


def _committed_text(current: int | None, wanted: int | None) -> str:
    """Return words such as "3 is committed, 4 as soon as all sites have it".

    Args:
        current: Version that all sites use now; None: there is none yet.
        wanted: Version that they should use; None: there is none yet.
    """
    text = "none is committed" if current is None else f"{current} is committed"
    if wanted != current:
        text += f", {wanted} as soon as all sites have it"
    return text


def _row(host: dict[str, Any], versions: list[int]) -> list[str]:
    """Return the cells of a row of the table, in the order of COLUMNS.

    Args:
        host: State of the host, from the status.
        versions: All published versions, in ascending order.
    """
    return [
        printable(str(host["site"])),
        printable(str(host["host"])),
        _version_text(host["current"]),
        _version_text(host["newest"]),
        _arriving_text(host),
        format_rate(host["bits_per_second"], 3) if host["bits_per_second"] else "",
        _lag_text(host, versions),
        format_bytes(host["wan_bytes"]),
        format_bytes(host["site_bytes"]),
        f"{host['heard_s']:.0f}",
    ]


def _version_text(version: int | None) -> str:
    return "" if version is None else str(version)


def _arriving_text(host: dict[str, Any]) -> str:
    """Return the version that a host receives now, and the share that has arrived, such as "12 (40%)"."""
    if host["receiving"] is None:
        return ""
    if not host["size_bytes"]:
        return str(host["receiving"])
    share = min(1.0, host["received_bytes"] / host["size_bytes"])
    return f"{host['receiving']} ({share:.0%})"


def _lag_text(host: dict[str, Any], versions: list[int]) -> str:
    """Return the number of newer versions that a host lacks, and its lag, such as "2 versions, 31 s".

    Returns:
        "" if the host has the newest version.
    """
    newest = host["newest"]
    missing = [version for version in versions if newest is None or version > newest]
    if not missing:
        return ""
    return f"{counted(len(missing), 'version')}, {host['lag_s']:.0f} s"


@contextmanager
def progress_bar(receiver: WeightsReceiver, is_quiet: bool) -> Iterator[None]:
    """Context manager that shows a progress bar for the version that a receiver receives.

    The bar is on standard error. Nothing is shown if standard error is no terminal.

    Args:
        receiver: The receiver.
        is_quiet: Whether to show nothing in any case.
    """
    console = Console(stderr=True)
    if is_quiet or not console.is_terminal:
        yield
        return
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,  # no bar remains at the end
        # On a terminal, printed lines appear above the bar; a file or a pipe gets them unchanged.
        redirect_stdout=sys.stdout.isatty(),
    )
    ended = threading.Event()
    thread = threading.Thread(target=_update_bars, args=(progress, receiver, ended), daemon=True)
    with progress:
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _update_bars(progress: Progress, receiver: WeightsReceiver, ended: threading.Event) -> None:
    """Update the progress bar of the version that a receiver receives, until `ended` is set.

    Runs in a thread. When another version begins to arrive, a new bar replaces the old one.

    Args:
        progress: Display of bars on the terminal.
        receiver: The receiver.
        ended: Set by the caller to end this function.
    """
    bar: TaskID | None = None
    transfer_of_bar: VersionTransfer | None = None
    while not ended.wait(_UPDATE_S):
        transfer = receiver.transfer  # None: no version is received now
        if transfer is not transfer_of_bar and bar is not None:
            progress.remove_task(bar)
            bar = None
        transfer_of_bar = transfer
        if transfer is None:
            continue
        if bar is None:
            name = f"version {transfer.manifest.version}"
            bar = progress.add_task(
                name, total=transfer.manifest.bytes, completed=transfer.written_bytes
            )
        progress.update(bar, completed=transfer.written_bytes)
