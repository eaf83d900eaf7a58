"""Sealing of the outer state in a checkpoint with a digest, so that a damaged file is refused as a whole."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from holmes_ext.errors import HolmesError
from holmes_ext.join.sockets.handshake import printable

#: Version of the format.
VERSION = 2
#: Bytes of a tensor that are hashed at a time.
_CHUNK = 2**24
#: Characters of an error that a message quotes.
_LONGEST_ERROR = 100


def wrap_with_digest(state: dict[str, Any]) -> dict[str, Any]:
    """Return the document to save: version, digest, and the state.

    Args:
        state: Nested dicts and lists of tensors, numbers and texts.
    """
    return {"version": VERSION, "digest": _digest_of(state), "outer": state}


def unwrap_verified(saved: Any, source: str) -> dict[str, Any]:
    """Check the digest and version of a saved outer state, and return the state.

    Args:
        saved: The dict that wrap_with_digest() returned when the state was saved.
        source: Name of the checkpoint in error messages.

    Raises:
        HolmesError: The state is damaged, or has the format of another version.
    """
    if not isinstance(saved, dict) or not isinstance(saved.get("version"), int):
        raise HolmesError(
            f"{source}: this is not outer state; omit it to take the weights from another job"
        )
    if saved["version"] != VERSION:
        raise HolmesError(
            f"{source}: outer state of version {saved['version']}, this holmes_ext reads {VERSION}; omit"
            " it to take the weights from another job"
        )
    state = saved.get("outer")
    try:
        is_sound = isinstance(state, dict) and _digest_of(state) == saved.get("digest")
    except (TypeError, RuntimeError, RecursionError):  # the damaged state has other types than ours
        is_sound = False
    if not is_sound or not isinstance(state, dict):
        raise HolmesError(
            f"{source}: the outer state is damaged (its digest differs); load an earlier checkpoint, or"
            " omit it to take the weights from another job"
        )
    return state


@contextlib.contextmanager
def refuse_unexpected_structure(source: str) -> Iterator[None]:
    """Context manager: convert errors while a checkpoint's state is loaded into a HolmesError.

    A state of unexpected structure causes KeyError, TypeError, ValueError, AttributeError or
    RuntimeError; only these are converted.

    Args:
        source: Name of the checkpoint in the message.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise HolmesError(
            f"{source}: the outer state is not as this holmes_ext writes it ({type(error).__name__}: "
            f"{printable(str(error), _LONGEST_ERROR)}); omit it to take the weights from another job"
        ) from None


def _digest_of(state: Any) -> str:
    """Return the SHA-256 of a state, in hexadecimal digits."""
    digest = hashlib.sha256()
    _add_to_digest(digest, state)
    return digest.hexdigest()


def _add_to_digest(digest: Any, value: Any) -> None:
    """Add a value of the state to a hashlib digest, recursively.

    Types, shapes and lengths are added, too, so that different states have different digests.

    Raises:
        TypeError: The value has a type that no outer state contains.
    """
    if isinstance(value, torch.Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)} ".encode())
        data = value.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
        for part in data.split(_CHUNK):
            digest.update(part.numpy().data)
    elif isinstance(value, dict):
        digest.update(f"dict {len(value)} ".encode())
        for key in value:
            digest.update(f"{key!r} ".encode())
            _add_to_digest(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f"list {len(value)} ".encode())
        for item in value:
            _add_to_digest(digest, item)
    elif value is None or isinstance(value, (bool, int, float, str)):
        digest.update(f"{value!r} ".encode())
    else:
        raise TypeError(f"{type(value).__name__} in an outer state")
