"""Records how long the slow tests take, for the pytest plugin selection.py.

    python tests/slow_tests.py build/results/tests.xml ...

Reads JUnit XML files that pytest wrote, and updates slow_tests.json: {"FILE::TEST": seconds}. A landing runs
only a share of the tests in that file. `make slow-tests` reads the files of the last run of all tests.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from selection import RECORD, ROOT
from summary import Outcome, Result, read_part

SLOW_S = 5.0  # seconds from which on a test is slow


def updated(record: Mapping[str, float], results: Iterable[Result]) -> dict[str, float]:
    """Return the record of slow tests after another run of the tests.

    A test that this run left out keeps its seconds. A test is removed if it is now quick, or if its file no
    longer exists.

    Args:
        record: Seconds of the slow tests, by node id.
        results: Results of the tests that ran.
    """
    # A test may have run several times, over gloo and over NCCL: the slowest run counts.
    measured: dict[str, float] = {}
    for result in results:
        # A failed test may have ended early, or waited for its timeout.
        if result.outcome is Outcome.PASSED:
            measured[result.name] = max(measured.get(result.name, 0.0), result.seconds)
    seconds = dict(record)
    for name, seconds_of_test in measured.items():
        if seconds_of_test >= SLOW_S:
            seconds[name] = round(seconds_of_test, 1)
        else:
            seconds.pop(name, None)
    return {name: seconds[name] for name in sorted(seconds) if _has_file(name)}


def _has_file(node_id: str) -> bool:
    return (ROOT / node_id.partition("::")[0]).exists()


def main(files: Sequence[str]) -> None:
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    results = [result for file in files for result in read_part(Path(file)).tests]
    RECORD.write_text(json.dumps(updated(record, results), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
