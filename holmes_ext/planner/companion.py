"""Interface of a forecast that an extension shows beside plans (`holmes plan --joined`).

The contribution point "plan_companions" takes a module with

    add_arguments(add)               adds its arguments; `add` is add_argument() of the search's group
    wanted(args) -> bool             whether the arguments ask for the forecast
    beside(result, seconds)          makes a PlanCompanion for a SearchResult, in about `seconds` seconds
"""

from __future__ import annotations

from typing import Any, Protocol


class PlanCompanion(Protocol):
    """Forecast that an extension adds to the output of `holmes plan`, such as a forecast of joined jobs.

    An extension implements all four methods; beside() of its module makes the object from the
    search result. Then `holmes plan` calls the method for the output that the user asked for: JSON,
    text, picture or HTML page.
    """

    def document(self) -> dict[str, Any]:
        """Return the forecast as a dictionary for `holmes plan --json`."""

    def show(self) -> None:
        """Print the forecast."""

    def figure(self) -> Any:
        """Return the forecast as a matplotlib figure for --pictures."""

    def page_parts(self) -> list[str]:
        """Return the forecast as parts of the page of --html."""
