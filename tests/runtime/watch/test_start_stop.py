import pytest
import torch

from holmes_ext.cluster.fabric import Fabric
from holmes_ext.cluster.site import Node, Port, Site
from holmes_ext.options import Options
from holmes_ext.plan import maker
from holmes_ext.plan.plan import Plan
from holmes_ext.report.files import load
from holmes_ext.runtime.measure import telemetry
from holmes_ext.runtime.session import Session
from holmes_ext.runtime.start import launcher
from holmes_ext.runtime.watch import start_stop

ETHERNET = Fabric("ethernet", "ethernet", 10**9, 1e-4)
SITE = Site((Node("a0", "a", 1, (Port("ethernet", "lo"),)),), (ETHERNET,))


@pytest.fixture
def begin():
    """Return a function that begins a job of one process with these options.

    holmes is switched off afterwards.
    """

    def call(**options):
        process = launcher.Process(0, 1, 0, 1, "127.0.0.1", 0, launcher.NONE)
        return start_stop.start(
            Session(
                Options(**options), process, SITE, Plan(SITE.digest, ("a0",), 1), 0, maker=maker
            )
        )

    yield call
    start_stop.stop()


def train(steps):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(steps):
        weight.grad = torch.ones(2)
        optimizer.step()


def test_a_plain_loop_is_recorded(begin, tmp_path):
    (line,) = begin(telemetry=str(tmp_path))
    assert str(tmp_path) in line
    train(4)
    start_stop.stop()
    assert telemetry.recorder is None
    run = load(tmp_path)
    assert list(run.ranks[0].steps) == [0, 1, 2, 3] and run.ranks[0].closed
    assert [span[0] for span in run.ranks[0].steps[2]["spans"]] == ["optimizer"]
    train(1)  # no hook is left
    assert list(load(tmp_path).ranks[0].steps) == [0, 1, 2, 3]


def test_off_means_nothing(begin):
    assert (
        begin(watchdog="5") == [] and telemetry.recorder is None
    )  # one process: nobody to wait for
    train(1)


def test_a_place_that_cannot_be_written_does_not_end_the_job(begin, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert begin(telemetry=str(tmp_path / "file")) == []
    err = capsys.readouterr().err
    assert "rank 0 trains without telemetry" in err and err.count("\n") == 1
    train(1)
