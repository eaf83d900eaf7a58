"""What a job changes in its process until its first step, so that a restarted job trains again soon."""

import gc

import pytest
import torch
from joined_jobs import coordinator

from holmes_ext.join import training
from holmes_ext.join.patches import torch as torch_joined
from holmes_ext.options import options_from


@pytest.fixture
def thresholds():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    torch_joined.detach()
    training.end()
    gc.set_threshold(*before)


def request(port):
    training.request(options_from(join=f"east@127.0.0.1:{port}"))


def step():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4)).sum().backward()
    optimizer.step()


def test_cyclic_garbage_is_looked_for_less_often_until_the_first_step(thresholds):
    """Scanning the objects of torch's modules again and again took half a second of each start."""
    with coordinator() as server:
        request(server.port)
        assert gc.get_threshold() == (50_000, 10, 10)
        torch_joined.attach()
        step()
        assert gc.get_threshold() == (700, 10, 10)
        training.end()


def test_a_job_that_never_steps_leaves_the_collector_as_it_was(thresholds):
    for port in (1, 2):  # the second request replaces the first
        request(port)
    training.end()
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(0, 10, 10), (90_000, 5, 5)])
def test_a_program_that_has_set_the_collector_keeps_its_setting(own, thresholds):
    gc.set_threshold(*own)
    request(1)
    assert gc.get_threshold() == own
    training.end()
    assert gc.get_threshold() == own


def test_a_setting_of_the_program_after_the_start_is_kept(thresholds):
    request(1)
    gc.set_threshold(5, 5, 5)
    training.end()
    assert gc.get_threshold() == (5, 5, 5)
