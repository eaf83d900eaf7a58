"""How busy the cores of this machine are, from /proc/stat."""

from holmes_lab import cores
from holmes_lab.cores import CoreMeter, CoreTimes, core_times, median_share


def test_waiting_for_a_disk_is_not_busy_and_interrupts_are(tmp_path):
    (tmp_path / "stat").write_text("cpu  100 10 50 800 30 5 3 2 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    assert core_times(tmp_path / "stat") == CoreTimes(170, 1000)


def test_a_share_of_the_time_between():
    assert CoreTimes(250, 1100).busy_since(CoreTimes(170, 1000)) == 0.8
    assert CoreTimes(170, 1000).busy_since(CoreTimes(170, 1000)) == 0.0


def test_the_median_of_its_pieces(monkeypatch):
    """Busy while it starts and ends, a quarter busy between."""
    clock, used = iter(range(100)), iter([0, 100, 125, 150, 175, 275])
    monkeypatch.setattr(cores.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(
        cores, "core_times", lambda at=iter(range(0, 10_000, 100)): CoreTimes(next(used), next(at))
    )
    meter = CoreMeter()
    for _ in range(5):
        meter.sample()
    assert median_share(meter.shares) == 0.25
    assert median_share(meter.shares, 2 * meter.SAMPLE_S) == (0.25 + 1.0) / 2


def test_this_machine():
    """Also of a job that ends within the first piece."""
    meter = CoreMeter()
    assert len(meter.shares) == 1 and 0.0 <= median_share(meter.shares) <= 1.0


def test_nothing_measured_is_nothing_used():
    assert median_share([]) == 0.0
