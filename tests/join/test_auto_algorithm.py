"""algorithm=auto: the outer algorithm follows from the job's optimizer, and all jobs must get the same."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from joined_jobs import HELLO, batch, coordinator, in_threads, model_of, run_at
from ranks import RankError, run_ranks

from holmes_ext.errors import HolmesError
from holmes_ext.join import training
from holmes_ext.join.algorithms import algorithm_for
from holmes_ext.join.coordinator.gate import Gate, JobIdentity
from holmes_ext.join.coordinator.reports import hello_from
from holmes_ext.join.patches import torch as joined
from holmes_ext.join.settings import parse_outer
from holmes_ext.options import options_from


@dataclass
class Wrapper:
    """A framework's optimizer around others, as DeepSpeed and megatron-core have them."""

    optimizer: Any = None
    chained_optimizers: Any = ()


class TensorParallelMuon:
    """Has the name of megatron-core's class."""


def adamw():
    return torch.optim.AdamW(model_of().parameters())


def muon():
    return torch.optim.Muon([torch.nn.Parameter(torch.ones(3, 3))])


needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9")


@needs_muon
def test_the_algorithm_fits_the_optimizer():
    assert algorithm_for(adamw()) == algorithm_for(None) == "muon"
    assert algorithm_for(Wrapper(adamw())) == "muon"
    assert algorithm_for(muon()) == algorithm_for(Wrapper(muon())) == "diloco"
    chained = Wrapper(chained_optimizers=[Wrapper(adamw()), Wrapper(TensorParallelMuon())])
    assert algorithm_for(chained) == "diloco"


def test_a_wrapper_that_contains_itself_ends_the_search():
    wrapper = Wrapper()
    wrapper.optimizer = wrapper
    assert algorithm_for(wrapper) == "muon"


@needs_muon
def test_only_auto_is_replaced():
    for given, expected in (("", "diloco"), ("algorithm=muon", "muon"), ("algorithm=co2", "co2")):
        assert parse_outer(given).for_optimizer(muon()).algorithm == expected


def train(rank, port, name, kind):
    """Train one step with the default settings; return the outer algorithm of the job."""
    training.request(options_from(join=f"{name}@127.0.0.1:{port}", outer="min=2,timeout=20"))
    joined.attach()
    try:
        model = torch.nn.Linear(3, 3, bias=False)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
        inputs, _ = batch(4, 0, 0)
        model(inputs[:, :3]).square().mean().backward()
        optimizer.step()
        return training._job.settings.algorithm
    finally:
        training.end()
        joined.detach()


def run(kinds):
    """Train jobs of one rank each with these classes of torch's optimizers; return their algorithms."""
    with coordinator() as server:
        found = in_threads(
            {
                name: lambda name=name, kind=kind: run_ranks(train, 1, server.port, name, kind)
                for name, kind in kinds.items()
            }
        )
    return {name: algorithm for name, (algorithm,) in found.items()}


@needs_muon
@pytest.mark.parametrize("kind, expected", [("AdamW", "muon"), ("Muon", "diloco")])
def test_real_jobs_agree(kind, expected):
    assert run({"east": kind, "west": kind}) == {"east": expected, "west": expected}


@needs_muon
def test_jobs_with_different_optimizers_are_refused():
    with pytest.raises(RankError, match="outer.algorithm"):
        run({"east": "AdamW", "west": "Muon"})


@pytest.mark.parametrize(
    "algorithm, is_admitted", [("muon", True), ("diloco", True), ("co2", False)]
)
def test_the_coordinator_admits_what_auto_may_be(algorithm, is_admitted):
    settings = parse_outer("")
    gate = Gate(run_at(6).served(), settings)
    agreed = {"outer": replace(settings, algorithm=algorithm).agreed()}
    identity, hello = (
        JobIdentity("east", "1", "certificate"),
        hello_from({**HELLO, "agreed": agreed}),
    )
    if is_admitted:
        assert gate.admit_hello(identity, hello, []).agreed == agreed
    else:
        with pytest.raises(HolmesError, match="algorithm"):
            gate.admit_hello(identity, hello, [])
