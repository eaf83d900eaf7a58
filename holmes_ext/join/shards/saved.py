"""Outer state in a checkpoint: sealed with a digest, so that a damaged file is refused before anything of it
is used."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from holmes_ext.errors import HolmesError
from holmes_ext.join.sockets.handshake import printable

VERSION = 2
#: Bytes of a tensor that are hashed at a time.
_CHUNK = 2**24


def sealed(state: dict[str, Any]) -> dict[str, Any]:
    """Tensors, numbers, texts, lists and dicts."""
    return {"version": VERSION, "digest": _digest_of(state), "outer": state}


def opened(saved: Any, source: str) -> dict[str, Any]:
    """What was sealed. HolmesError when it is damaged, or of another version."""
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
        sound = isinstance(state, dict) and _digest_of(state) == saved.get("digest")
    except (TypeError, RuntimeError, RecursionError):
        sound = False
    if not sound or not isinstance(state, dict):
        raise HolmesError(
            f"{source}: the outer state is damaged (its digest differs); load an earlier checkpoint, or"
            " omit it to take the weights from another job"
        )
    return state


@contextlib.contextmanager
def readable(source: str) -> Iterator[None]:
    """HolmesError where what is read has a good digest, and is yet none of our states."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise HolmesError(
            f"{source}: the outer state is not as this holmes_ext writes it ({type(error).__name__}: "
            f"{printable(str(error), 100)}); omit it to take the weights from another job"
        ) from None


def _digest_of(state: Any) -> str:
    digest = hashlib.sha256()
    _add(digest, state)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)} ".encode())
        data = value.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
        for part in data.split(_CHUNK):
            digest.update(part.numpy().data)
    elif isinstance(value, dict):
        digest.update(f"dict {len(value)} ".encode())
        for key in value:
            digest.update(f"{key!r} ".encode())
            _add(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f"list {len(value)} ".encode())
        for item in value:
            _add(digest, item)
    elif value is None or isinstance(value, (bool, int, float, str)):
        digest.update(f"{value!r} ".encode())
    else:
        raise TypeError(f"{type(value).__name__} in an outer state")
