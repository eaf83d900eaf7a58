"""The planner, an extension of holmes_ext: it searches for the best plan of a job, by simulated steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holmes_ext.extensions import Extension, Option

if TYPE_CHECKING:
    from holmes_ext.options import Options
    from holmes_ext.runtime.session import Session


def _is_checked(options: Options) -> bool:
    """Return whether --holmes-check is set: the job is checked, and ends before its first step."""
    return options.value("check") != "off"


def _session_is_checked(current: Session) -> bool:
    """Return whether the running job ends after its check, because --holmes-check is set."""
    return _is_checked(current.options)


def _problem_of_check(value: str) -> str:
    """Return the end of the error message for a value of --holmes-check; "" if the value is allowed."""
    if value in ("on", "off", "json") or value.endswith(".json"):
        return ""
    return "is none of on, json, off and the name of a file that ends in .json"


EXTENSION = Extension(
    name="planner",
    options=(
        Option(
            "check",
            "print which ranks run where, the network of each group, the predicted step with and without "
            "holmes, and what would help more; then end before the first step, with status 1 if a problem "
            "was found. --holmes-check alone prints text, --holmes-check=json prints JSON, "
            "--holmes-check=FILE.json writes it",
            default="off",
            check=_problem_of_check,
            bare_value="on",
        ),
    ),
    contributions={
        "command_parts": {"plan": "holmes_ext.planner.plan_command"},
        "report_pages": {"html": "holmes_ext.planner.html.report_page:document"},
        "pass_solvers": {"quickest": "holmes_ext.planner.schedule.solve:quickest"},
    },
    hooks={
        "on_options": "holmes_ext.planner.check.ending:refuse_joined_jobs",
        "on_ready": "holmes_ext.planner.check.ending:end_job",
    },
    is_active=_is_checked,
    applies_to=_session_is_checked,
)
