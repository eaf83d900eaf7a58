"""benchmarks/joined_losses.py simulates joined jobs in one process: it computes what real ones compute."""

import sys
import threading
from types import SimpleNamespace

import joined_jobs
import pytest
import torch
from joined_jobs import coordinator, in_threads, joined_of
from test_docs import ROOT

from holmes_ext.join.algorithms import ALGORITHMS
from holmes_ext.join.settings import parse_outer

sys.path.insert(0, str(ROOT / "benchmarks"))
_before = dict(ALGORITHMS)
from joined_losses import OuterLoop, flatten  # noqa: E402

# The benchmark adds algorithms that other tests, in the same process, do not expect.
ALGORITHMS.clear()
ALGORITHMS.update(_before)

#: Two, because the order in which real jobs come decides in which order three pseudo-gradients are summed.
JOBS = ("east", "west")
STEPS = 14
_SEEDING = threading.Lock()  # torch's generator belongs to the whole process


class Job:
    """A model and its inner optimizer, which trains on data of its own.

    Args:
        number: Number of the job, which chooses the data.
    """

    def __init__(self, number):
        with _SEEDING:
            self.model = joined_jobs.model_of()
        self.number = number
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, step):
        inputs, labels = joined_jobs.batch(8, self.number, step)
        self.optimizer.zero_grad()
        (self.model(inputs) - labels).square().mean().backward()
        self.optimizer.step()

    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def real_jobs(settings):
    """Weights of each job at the end: jobs with sockets, rounds and a coordinator, one thread each."""

    def train(number, name, port):
        job = Job(number)
        joined = joined_of(job.model, name, port, settings)
        joined.begin()
        for step in range(STEPS):
            job.step(step)
            joined.after_step()
        joined.end()
        return job.weights()

    with coordinator() as server:
        calls = {
            name: lambda k=k, name=name: train(k, name, server.port) for k, name in enumerate(JOBS)
        }
        return in_threads(calls)


def simulated_jobs(settings):
    """Return the same jobs, as the benchmark simulates them."""
    jobs = [Job(number) for number in range(len(JOBS))]
    trainers = [SimpleNamespace(model=job.model, flat=flatten(job.model)) for job in jobs]
    loop = OuterLoop(settings, trainers)
    for step in range(STEPS):
        for job in jobs:
            job.step(step)
        loop.after_step()
    assert loop.sent_bytes > 0
    return {name: job.weights() for name, job in zip(JOBS, jobs)}


@pytest.mark.parametrize(
    "algorithm, compress", [("diloco", "bf16"), ("muon", "bf16"), ("muon", "2bit")]
)
def test_simulated_jobs_end_with_the_weights_of_real_ones(algorithm, compress):
    settings = parse_outer(
        f"algorithm={algorithm},compress={compress},every=4,fragments=2,delay=1,min={len(JOBS)}"
    )
    real = real_jobs(settings)
    simulated = simulated_jobs(settings)
    for name in JOBS:
        assert (real[name] - simulated[name]).abs().max() < 1e-6, name
