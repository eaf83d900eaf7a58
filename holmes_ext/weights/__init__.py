"""Sends the weights of a model to other data centres while the model is trained, for example to generators.

A trainer publishes folders as numbered versions. A version goes once from the host of `holmes join serve` to
each site: one host of the site receives it over the WAN, and sends it on to the other hosts of the site. A
version can be read at a site only when all of its files are there. Identities, certificates and TLS are
those of joined jobs (holmes_ext/join).

Terms of this package:

    version    folder of files with a number. It never changes. Versions are published in ascending order
    delta      version that only has changes to an older version, its parent; any other version is full
    chain      a full version and the deltas that lead from it to a version, in the order of their numbers
    chunk      256 KiB to 8 MiB of a file of a version, with a SHA-256: the unit of transfer
    manifest   list of a version's files and chunks
    store      folder that holds versions: one of the publisher, and DIR of each receiving host

    service    part of `holmes join serve` that sends the versions of the publisher's store
    site       one end of the WAN, such as a data centre; its name is in the certificates of its hosts
    host       process of `holmes weights receive`; a machine usually runs one
    source     process from which a host pulls versions: the service, or another host of the same site.
               Its address is HOST:PORT; the address "" stands for the service
    stream     connection to a source, for pulling chunks

    arriving   some chunks of the version are still missing on a host (class StagedVersion)
    staged     the version is complete on a host, but need not be in use
    wanted     the publisher wants this version to be committed. The service commits it as soon as the hosts
               have staged it
    committed  all sites use this version; also called the current version (link DIR/current)
    required   versions that each host should have: chains of the newest, wanted and current version
    origin     random identity of the publisher's store; a host recognizes another run by it
    lag        seconds since the publication of the oldest newer version that a host has not staged

This module registers the command and the service with holmes, and contains the functions for Python programs.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from holmes_ext import extensions
from holmes_ext.errors import HolmesError
from holmes_ext.extensions import Extension

#: Seconds between two checks whether a version has arrived.
_POLL_S = 0.05

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
    """Publish a folder as a new version of the weights: it is sent to all sites.

    Call it on the host of `holmes join serve`, the process that sends versions to the sites. The folder is
    copied, so it may be removed afterwards.

    Args:
        folder: Folder with the files of the version. Nothing may change it during this call.
        version: Number of the version, greater than those of all versions before.
        parent: Version to which the folder is a delta; None: it is a full version.
        commits: Whether all sites switch to the version as soon as their hosts have received it. False: they
            switch only after `holmes weights commit`.
        port: Port of `holmes join serve`.

    Raises:
        HolmesError: The folder or a number cannot be used, or the folder changes during this call.
    """
    store = extensions.load("holmes_ext.weights.publishing:store_of_run")(os.environ, port)
    publish_folder: Any = extensions.load("holmes_ext.weights.publishing:publish_folder")
    publish_folder(Path(folder), store, version, parent=parent, commits=commits)


def current_folders(directory: str | Path) -> list[Path]:
    """Return the folders of the weights that this host should use now: those of the committed version.

    Args:
        directory: DIR of `holmes weights receive DIR`.

    Returns:
        The folder of a full version, then those of the deltas to apply to it. For example [DIR/8, DIR/9] if
        version 9 is committed, and is a delta to the full version 8. An empty list if no version is
        committed yet.

    Raises:
        HolmesError: A user has removed one of these folders.
    """
    store = _store_in(directory)
    missing_version = _missing_version()
    while True:
        committed = store.current
        if committed is None:
            return []
        try:
            return _chain_folders(store, committed)
        except missing_version:
            if store.current == committed:
                raise
            # Another version was committed meanwhile, and this one was removed: try again with the other one.


def wait_for_version(directory: str | Path, version: int, timeout_s: float = 1800.0) -> list[Path]:
    """Wait until this host has received a version completely, and return the version's folders.

    The version need not be committed.

    Args:
        directory: DIR of `holmes weights receive DIR`.
        version: Number of the version.
        timeout_s: Seconds to wait at most.

    Returns:
        The folder of a full version, then those of the deltas to apply to it.

    Raises:
        HolmesError: The version, or a version of its chain, has not arrived in time.
    """
    store = _store_in(directory)
    missing_version = _missing_version()
    end = time.monotonic() + timeout_s
    while True:
        try:
            return _chain_folders(store, version)
        except missing_version:
            if time.monotonic() > end:
                raise HolmesError(
                    f"{directory}: version {version} has not arrived within {timeout_s:g} s; is `holmes"
                    " weights receive` running there? `holmes weights status` shows what it receives"
                ) from None
        time.sleep(_POLL_S)


# `import holmes_ext` reads this module for EXTENSION. So the modules below are imported when they are needed.
def _store_in(directory: str | Path) -> Any:
    """Return the VersionStore of a folder of `holmes weights receive`."""
    store_class = extensions.load("holmes_ext.weights.store:VersionStore")
    return store_class(Path(directory))


def _missing_version() -> type[Exception]:
    """Return the class of exceptions that a VersionStore raises for a version that it does not have."""
    error_class: type[Exception] = extensions.load("holmes_ext.weights.store:MissingVersion")
    return error_class


def _chain_folders(store: Any, version: int) -> list[Path]:
    """Return the folder of a full version, then those of the deltas that lead from it to `version`."""
    return [store.folder(number) for number in store.chain(version)]
