"""What needed a second try (pytest --reruns, as .ci/run has it) is the last thing that is printed."""

import gc

import pytest

pytest_plugins = ["selection"]  # tests/selection.py: which exhaustive tests run


def pytest_collection_finish(session):
    """Else each garbage collection looks at all that tests have imported, which takes up to a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    result = yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    tried_again = reporter.stats.get("rerun", []) if reporter else []
    if tried_again:
        reporter.write_line(
            f"{len(tried_again)} needed a second try, and why the first one failed:"
        )
    for report in tried_again:
        crash = getattr(report.longrepr, "reprcrash", None)
        reporter.write_line(
            f"  {report.nodeid}: {crash.message.splitlines()[0] if crash else report.longrepr}"
        )
    return result
