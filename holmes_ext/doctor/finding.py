"""What `holmes doctor` says of one thing: what was found, why it matters, how to mend it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from holmes_ext.errors import HolmesError

#: A problem stops a job or makes it slow; a note is worth knowing and may be meant so.
LEVELS = ("problem", "note")


@dataclass(frozen=True)
class Finding:
    """level: "problem" or "note"; about: the NIC, variable, package or file ("mlx5_0:1"); the rest are one line of text each."""

    level: str
    about: str
    what: str
    why: str
    mend: str

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str) or not value or "\n" in value or len(value) > 2000:
                raise HolmesError(f"finding: key {field.name!r} must be one line of text, not {value!r:.80}")
        if self.level not in LEVELS:
            raise HolmesError(f"finding: key 'level' is {self.level!r:.80}, not one of {', '.join(LEVELS)}")

    def to_dict(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Any, where: str) -> Finding:
        """The Finding of a JSON object; HolmesError begins with `where` and names the key."""
        names = {field.name for field in fields(cls)}
        if not isinstance(document, dict) or set(document) != names:
            raise HolmesError(f"{where}: a finding must have exactly the keys {', '.join(sorted(names))}")
        try:
            return cls(**document)
        except HolmesError as error:
            raise HolmesError(f"{where}: {error}") from None


def problem(about: str, what: str, why: str, mend: str) -> Finding:
    return Finding("problem", about, what, why, mend)


def note(about: str, what: str, why: str, mend: str) -> Finding:
    return Finding("note", about, what, why, mend)
