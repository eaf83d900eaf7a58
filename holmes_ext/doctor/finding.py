"""What `holmes doctor` says of one thing: what was found, why it matters, how to mend it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial

from holmes_ext.errors import HolmesError

#: A problem stops a job or makes it slow; a note is worth knowing and may be meant so.
LEVELS = ("problem", "note")


@dataclass(frozen=True)
class Finding:
    """level: "problem" or "note"; about: the NIC, variable, package or file; the rest: a line each."""

    level: str
    about: str
    what: str
    why: str
    mend: str

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value or "\n" in value or len(value) > 2000:
                raise HolmesError(
                    f"finding: key {field.name!r} must be one line of text, not {value!r:.80}"
                )
        if self.level not in LEVELS:
            raise HolmesError(
                f"finding: key 'level' is {self.level!r:.80}, not one of {', '.join(LEVELS)}"
            )


problem, note = partial(Finding, "problem"), partial(Finding, "note")
