"""Identity of a store of versions: a receiving host accepts versions of one store only.

Each run numbers its versions anew. So a folder with versions 1 to 5 of an earlier run would seem to have
versions 1 to 5 of this run. To tell runs apart, the publisher's store has a random identity, its origin:

    in the publisher's store    DIR/.holmes/origin has this identity; it is made when the service starts first
    at a receiving host         DIR/.holmes/origin has the identity of the store from which the versions come
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
    """Return the identity of a publisher's store.

    If the store has no identity yet, a random one is made and written to the file DIR/.holmes/origin.

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
    """Raise an error if a receiving host's store has versions of another run.

    A store without versions takes over the origin.

    Args:
        store: Store of the receiving host.
        origin: Identity of the publisher's store to which the host connects.

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
    """Return the identity of the publisher's store, which the status of the service contains.

    Tries again for as long as the service cannot be reached.

    Args:
        place: Address of `holmes join serve`, and the certificate of this site.

    Raises:
        Refused: The service rejects this site.
        HolmesError: The process at the address serves no weights.
    """
    weights_status = None
    is_answered = False
    while not is_answered:
        try:
            weights_status = _read_weights_status(place)
            is_answered = True
        except OSError:
            time.sleep(_RETRY_S)
    if not isinstance(weights_status, dict) or not isinstance(weights_status.get("origin"), str):
        raise HolmesError(
            "the service sends no weights; install the same holmes_ext there, and restart it"
        )
    return str(weights_status["origin"])


def _read_weights_status(place: JoinPlace) -> object:
    """Return what the status of `holmes join serve` has on weights; None: nothing.

    Raises:
        OSError: The process cannot be reached.
    """
    deadline = Deadline(HANDSHAKE_S, "the service's status")
    channel = place.call({"purpose": "status"}, deadline)
    try:
        status = channel.receive(deadline)
    finally:
        channel.close()
    weights_status: object = status.get("weights")
    return weights_status


def _origin_file(store: VersionStore) -> Path:
    return store.path / ".holmes" / "origin"


def _recorded_origin(store: VersionStore) -> str:
    """Return the identity that the file DIR/.holmes/origin has; "": there is no such file."""
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
