"""A rank that comes late, over NCCL: holmes's watchdog names it; after the timeout torch's ends the job."""

from integration_tests.jobs import ROOT

LATE = str(ROOT / "integration_tests" / "gpu" / "late.py")


def late(lab, seconds):
    flags = ("--holmes", "--holmes-cluster", str(lab.file), "--holmes-watchdog", "2,3")
    return lab.run(LATE, str(seconds), *flags, order="a0,b0", timeout=200)


def test_late_by_less_than_the_timeout(lab):
    ran = late(lab, 8)
    assert ran.result.returncode == 0 and ran.said.count("done") == 4, ran.said
    assert "waits for rank 1" in ran.said, ran.said


def test_late_by_more_than_the_timeout(lab):
    """Torch's words for it, which holmes's groups keep; no rank is left waiting."""
    ran = late(lab, 30)
    told = "".join(ran.result.outputs.values())
    assert ran.result.returncode not in (0, 124) and "done\n" not in told, told
    assert "waits for rank 1" in told and "Watchdog caught collective operation timeout" in told, (
        told
    )
    assert "holmes: rank 0 on node a0: communication failed; the timeout has passed" in told, told
