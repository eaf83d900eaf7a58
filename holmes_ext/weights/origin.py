"""Prevents a receiving host from mixing versions of the weights of different training runs in a folder.

Each run numbers its versions anew. So a folder with versions 1 to 5 of an earlier run would seem to have
versions 1 to 5 of this run. To tell runs apart, the store (folder) from which a run publishes its versions
has a random identity, its origin:

    in the publisher's store    DIR/.holmes/origin has this identity; it is made when the service starts first
    at a receiving host         DIR/.holmes/origin has the identity of the store that its versions come from
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from holmes_ext.errors import HolmesError
from holmes_ext.files import write_whole
from holmes_ext.join.address import JoinPlace
from holmes_ext.join.coordinator.client import read_status
from holmes_ext.weights.store import VersionStore
from holmes_ext.words import why

#: Seconds between two attempts to reach the service.
_RETRY_S = 0.5


def origin_of(store: VersionStore) -> str:
    """Return the random identity of a store, the folder with the published versions of a training run.

    If the store has no identity yet, one is created and written to the file DIR/.holmes/origin.

    Returns:
        The identity: 32 hexadecimal digits.

    Raises:
        HolmesError: The file cannot be read or written.
    """
    origin = _recorded_origin(store)
    if not origin:
        origin = secrets.token_hex(16)
        _record_origin(store, origin)
    return origin


def check_origin(store: VersionStore, origin: str) -> None:
    """Raise an error if the folder of a receiving host has versions of another training run.

    If the folder has no versions yet, the identity of this run is recorded in it.

    Args:
        store: Folder of the receiving host.
        origin: Identity of the publisher's store of this run.

    Raises:
        HolmesError: The folder has versions of another run, or cannot be written to.
    """
    if _recorded_origin(store) == origin:
        return
    if store.versions():
        raise HolmesError(
            f"{store.path}: has versions of another run, whose numbers would be mistaken for those of this"
            " one; name an empty folder"
        )
    _record_origin(store, origin)


def fetch_origin(service: JoinPlace) -> str:
    """Return the identity of the publisher's store, from the status of `holmes join serve`.

    Tries again for as long as `holmes join serve` cannot be reached.

    Args:
        service: Address of `holmes join serve`, and the certificate of this site.

    Raises:
        Refused: The service rejects this site.
        HolmesError: The process at the address serves no weights.
    """
    while True:
        try:
            status = read_status(service.address.host, service.address.port, service.credentials)
            break
        except OSError:
            time.sleep(_RETRY_S)
    weights_status = status.get("weights")
    if not isinstance(weights_status, dict) or not isinstance(weights_status.get("origin"), str):
        raise HolmesError(
            "the service sends no weights; install the same holmes_ext there, and restart it"
        )
    return str(weights_status["origin"])


def _origin_file(store: VersionStore) -> Path:
    return store.path / ".holmes" / "origin"


def _recorded_origin(store: VersionStore) -> str:
    """Return the identity in the file DIR/.holmes/origin of a store; "": there is no such file."""
    try:
        return _origin_file(store).read_text()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise HolmesError(f"{_origin_file(store)}: cannot be read ({why(error)})") from None


def _record_origin(store: VersionStore, origin: str) -> None:
    try:
        write_whole(_origin_file(store), origin)
    except OSError as error:
        raise HolmesError(
            f"{_origin_file(store)}: cannot be written ({why(error)}); make space, or name another folder"
        ) from None
