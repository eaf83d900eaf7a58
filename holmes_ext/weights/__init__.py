"""Weights to other sites: each version of the weights goes to each site once, complete or not at all.

A trainer publishes folders as numbered versions. They go from the host of `holmes join serve` to one host
of each site, which passes them on to the other hosts of the site. Identities, certificates and TLS are
those of joined jobs.

This module declares the command and the service, and is the Python interface.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from holmes_ext import extensions
from holmes_ext.errors import HolmesError
from holmes_ext.extensions import Extension

#: Seconds between two looks for a version that has not arrived.
_LOOK_S = 0.05

EXTENSION = Extension(
    name="weights",
    variables={
        "HOLMES_WEIGHTS_STORE": "folder for published weights, of `holmes join serve` and `holmes weights"
        " publish` (default: in the state folder of the run)",
        "HOLMES_WEIGHTS_RATE": "rate that the weights which `holmes join serve` sends take at most, such as"
        " 400Mb/s",
        "HOLMES_WEIGHTS_METRICS": "PORT (of 127.0.0.1), HOST:PORT or FILE.prom: versions, bytes and lag of"
        " all receiving hosts, for Prometheus, from `holmes join serve` (extra `metrics`)",
    },
    commands={"weights": "holmes_ext.weights.cli"},
    contributions={"join_services": {"weights": "holmes_ext.weights.service:serve_weights"}},
)


def publish(
    folder: str | Path,
    version: int,
    parent: int | None = None,
    commits: bool = True,
    port: int = 29600,
) -> None:
    """Publish a folder as a version of the weights, on the host of `holmes join serve`.

    Args:
        folder: Folder with the files of the version. Nothing may change it meanwhile.
        version: Number of the version, greater than those of all versions before.
        parent: Version to which the folder is a delta; None: it is a full version.
        commits: All sites switch to the version as soon as they have staged it. False: only after
            `holmes weights commit`.
        port: Port of `holmes join serve`.

    Raises:
        HolmesError: The folder or a number cannot be used, or the folder changes meanwhile.
    """
    store = extensions.load("holmes_ext.weights.publishing:store_of_run")(os.environ, port)
    publish_folder: Any = extensions.load("holmes_ext.weights.publishing:publish_folder")
    publish_folder(Path(folder), store, version, parent=parent, commits=commits)


def current_folders(directory: str | Path) -> list[Path]:
    """Return the folders of the committed version at a site: a full version, then the deltas to apply to it.

    Args:
        directory: DIR of `holmes weights receive DIR`.

    Returns:
        An empty list if no version is committed yet.
    """
    store: Any = extensions.load("holmes_ext.weights.store:VersionStore")(Path(directory))
    missing_version = extensions.load("holmes_ext.weights.store:MissingVersion")
    while (current := store.current) is not None:
        try:
            return [store.folder(version) for version in store.chain(current)]
        except missing_version:
            if store.current == current:
                raise
            # Another version was committed, and the former one was removed.
    return []


def wait_for_version(directory: str | Path, version: int, timeout_s: float = 1800.0) -> list[Path]:
    """Wait until a version has arrived at a site, whether it is committed or not.

    Args:
        directory: DIR of `holmes weights receive DIR`.
        version: Number of the version.
        timeout_s: Seconds to wait at most.

    Returns:
        The version's folders: a full version, then the deltas to apply to it.

    Raises:
        HolmesError: The version has not arrived in time.
    """
    store: Any = extensions.load("holmes_ext.weights.store:VersionStore")(Path(directory))
    missing_version = extensions.load("holmes_ext.weights.store:MissingVersion")
    end = time.monotonic() + timeout_s
    while True:
        try:
            return [store.folder(number) for number in store.chain(version)]
        except missing_version:
            if time.monotonic() > end:
                raise HolmesError(
                    f"{directory}: version {version} has not arrived within {timeout_s:g} s; is `holmes"
                    " weights receive` running there? `holmes weights status` shows what it receives"
                ) from None
        time.sleep(_LOOK_S)
