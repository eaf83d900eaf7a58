"""Functions of extensions that a running job calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holmes_ext.runtime.session import Session

#: Called before the gradients of a step are reduced, on all ranks in the same order. Arguments: the session;
#: the global ranks that reduce; the API of their network, "verbs" or "sockets"; and the object that reduces,
#: which stays the same in all steps.
on_reduction: list[Callable[[Session, tuple[int, ...], str, object], None]] = []
