"""The planner, an extension of holmes_ext: it searches for the best plan of a job, by simulated steps."""

from holmes_ext.extensions import Extension

EXTENSION = Extension(
    name="planner",
    contributions={
        "command_parts": {"plan": "holmes_ext.planner.plan_command"},
        "report_pages": {"html": "holmes_ext.planner.html.report_page:document"},
        "pass_solvers": {"quickest": "holmes_ext.planner.schedule.solve:quickest"},
    },
)
