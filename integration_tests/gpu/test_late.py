"""Tests jobs over NCCL in which a rank is late.

Holmes's watchdog names the rank. After the timeout, torch's watchdog ends the job.
"""

import pytest

from integration_tests.jobs import ROOT

LATE = str(ROOT / "integration_tests" / "gpu" / "late.py")


def run_late(lab, seconds):
    """Run late.py, whose rank 1 is late by so many seconds, with holmes's watchdog."""
    flags = ("--holmes", "--holmes-cluster", str(lab.file), "--holmes-watchdog", "2,3")
    return lab.run(LATE, str(seconds), *flags, order="a0,b0", timeout=200)


def test_late_by_less_than_the_timeout(lab):
    ran = run_late(lab, 8)
    assert ran.result.returncode == 0 and ran.said.count("done") == 4, ran.said
    assert "waits for rank 1" in ran.said, ran.said


@pytest.mark.full(share=4)
def test_late_by_more_than_the_timeout(lab):
    """Groups that holmes makes keep torch's watchdog, which ends all ranks."""
    ran = run_late(lab, 30)
    output = "".join(ran.result.outputs.values())
    assert ran.result.returncode not in (0, 124) and "done\n" not in output, output
    assert "waits for rank 1" in output, output
    assert "Watchdog caught collective operation timeout" in output, output
    failure = "holmes: rank 0 on node a0: communication failed; the timeout has passed"
    assert failure in output, output
