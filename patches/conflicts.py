"""Versions of two packages that do not work together, with or without holmes: what they say themselves, and
what was found. And a Python that holmes refuses."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator

from packaging.requirements import InvalidRequirement, Requirement

from holmes_ext.patches.engine.patch import installed_version

#: (one package, the other, what happens, what mends it), found by trying them.
_FOUND = (
    (
        "deepspeed<0.14.4",
        "torch>=2.4",
        "`import deepspeed` ends with ImportError: it needs what torch 2.4 took out of "
        "torch.distributed.elastic",
        "pip install 'deepspeed>=0.14.4'",
    ),
    (
        "deepspeed>=0.18.9,<0.19",
        "torch>=2.13",
        "ZeRO 1 and 2 end in their first step with RuntimeError (Output 0 of Split is a view and is being "
        "modified inplace), found on CPUs; without ZeRO it trains",
        "pip install 'deepspeed<0.18.9' or 'deepspeed>=0.19'",
    ),
)
#: Whose own requirements are looked at: those that holmes patches.
_STATED_BY = ("deepspeed", "megatron-core")
WITH_GIL = "set PYTHON_GIL=1, or take a Python that has the lock"


def without_gil() -> str:
    """What this process's Python lacks, where it is a free-threaded one; "" where it has the lock."""
    enabled = getattr(sys, "_is_gil_enabled", None)  # Python 3.13 and newer
    return (
        ""
        if enabled is None or enabled()
        else "this Python runs without the global interpreter lock"
    )


def conflicts(
    version_of: Callable[[str], str | None] = installed_version,
) -> Iterator[tuple[str, str, str]]:
    """(which two, what happens, what mends it) of the installed versions, or those that version_of gives."""
    for first, second, what, mend in _FOUND:
        names = [Requirement(text) for text in (first, second)]
        if all(_fits(name, version_of(name.name)) for name in names):
            yield (
                " with ".join(f"{name.name} {version_of(name.name)}" for name in names),
                what,
                mend,
            )
    for name in filter(version_of, _STATED_BY):
        for needed in _stated(name):
            version = version_of(needed.name)
            if version is not None and needed.specifier and not _fits(needed, version):
                which = f"{name} {version_of(name)} with {needed.name} {version}"
                yield (
                    which,
                    f"{name} asks for {needed}",
                    f"pip install '{needed}', or another {name}",
                )


def _fits(needed: Requirement, version: str | None) -> bool:
    return version is not None and needed.specifier.contains(version, prereleases=True)


def _stated(name: str) -> Iterator[Requirement]:
    """Of its metadata, those that hold here, without extras."""
    for text in importlib.metadata.requires(name) or []:
        try:
            needed = Requirement(text)
        except InvalidRequirement:
            continue
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            yield needed
