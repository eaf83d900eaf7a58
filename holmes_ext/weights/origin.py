"""Identity of a store of versions: a receiving host accepts versions of one store only.

Each run numbers its versions anew, so a folder with versions of an earlier run would seem to have those of
this one. The file DIR/.holmes/origin has the random identity of the store: of the publisher's own store, or
at a receiving host of the store from which its versions came.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from holmes_ext.errors import HolmesError
from holmes_ext.files import write_whole
from holmes_ext.join.address import JoinPlace
from holmes_ext.join.sockets.handshake import HANDSHAKE_S
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.weights.store import VersionStore
from holmes_ext.words import why

#: Seconds between two attempts to reach the service.
_RETRY_S = 0.5


def origin_of(store: VersionStore) -> str:
    """Return the identity of a publisher's store; the first call makes it.

    Raises:
        HolmesError: The store cannot be written to.
    """
    origin = _recorded_origin(store)
    if not origin:
        origin = secrets.token_hex(16)
        _record_origin(store, origin)
    return origin


def check_origin(store: VersionStore, origin: str) -> None:
    """Accept an empty store for versions of an origin, or one that has versions of that origin.

    Raises:
        HolmesError: The store has versions of another origin, or cannot be written to.
    """
    if _recorded_origin(store) == origin:
        return
    if store.versions():
        raise HolmesError(
            f"{store.path}: has versions of another run, whose numbers would be mistaken for those of this"
            " one; name an empty folder"
        )
    _record_origin(store, origin)


def ask_origin(place: JoinPlace) -> str:
    """Return the identity of the service's store, after waiting until the service can be reached.

    Raises:
        Refused: The service rejects this site.
        HolmesError: It serves no weights.
    """
    while True:
        try:
            deadline = Deadline(HANDSHAKE_S, "the service's status")
            channel = place.call({"purpose": "status"}, deadline)
            try:
                status = channel.receive(deadline).get("weights")
            finally:
                channel.close()
        except OSError:
            time.sleep(_RETRY_S)
            continue
        if not isinstance(status, dict) or not isinstance(status.get("origin"), str):
            raise HolmesError(
                "the service sends no weights; install the same holmes_ext there, and restart it"
            )
        return str(status["origin"])


def _origin_file(store: VersionStore) -> Path:
    return store.path / ".holmes" / "origin"


def _recorded_origin(store: VersionStore) -> str:
    """Return the identity in the store; "": it has none."""
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
