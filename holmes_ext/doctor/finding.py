"""A finding of `holmes doctor`: the problem, why it matters, and how to solve it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import partial

from holmes_ext.errors import HolmesError
from holmes_ext.words import grouped, some_of

#: A "problem" stops a job or makes it slow. A "note" may be intended.
LEVELS = ("problem", "note")
_MOST_CHARACTERS = 2000  # of each text
_MOST_NAMED = 16  # NICs that a finding lists


@dataclass(frozen=True)
class Finding:
    """A problem, or a note, that `holmes doctor` has found. Each text is one line."""

    level: str  # "problem" or "note" (LEVELS)
    about: str  # the NIC, variable, package or file
    what: str  # the problem
    why: str  # its effect
    mend: str  # advice for the user

    def __post_init__(self) -> None:
        """Raise HolmesError if `level` is not in LEVELS, or if a field is not one line of text."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not value or "\n" in value or len(value) > _MOST_CHARACTERS:
                raise HolmesError(
                    f"finding: key {field.name!r} must be one line of text, not {value!r:.80}"
                )
        if self.level not in LEVELS:
            raise HolmesError(
                f"finding: key 'level' is {self.level!r:.80}, not one of {', '.join(LEVELS)}"
            )


#: Make a Finding of this level.
problem = partial(Finding, "problem")
note = partial(Finding, "note")


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Merge the findings that differ only in `about` (what they are about) into one with all names.

    Eight HCAs with the same fault give one finding about "mlx5_0:1, mlx5_1:1, ...".
    """
    names_of = grouped((replace(finding, about="-"), finding.about) for finding in findings)
    return [
        replace(finding, about=some_of(dict.fromkeys(names), _MOST_NAMED))
        for finding, names in names_of.items()
    ]
