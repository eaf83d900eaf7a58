"""Clusters of a data-parallel job go on by themselves and come back: gradients inside each, weights averaged
across in rounds, all replicas alike afterwards."""

from dataclasses import replace

import pytest
import torch
from clusters import site
from ranks import run_ranks, seeded

from holmes_ext.errors import HolmesError
from holmes_ext.join import training
from holmes_ext.join.settings import apart_settings
from holmes_ext.options import Options
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime import session
from holmes_ext.runtime.reduce.reducer import GradientReducer
from holmes_ext.runtime.start.launcher import Process

STEPS, WIDTH, LEAVES, RETURNS = 16, 8, 3, 12
CLUSTERS = [(0, 1), (2, 3)]


def model():
    torch.manual_seed(7)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def loss_of(one, rank, step):
    return one(torch.randn(4, WIDTH, generator=seeded(1000 * step + rank))).square().sum()


def optimizer_of(one, kind):
    return getattr(torch.optim, kind)(one.parameters(), lr=0.01)


def trained(rank, outer, kind, two_levels):
    """Of a rank: the weights after each step, the optimizer's state at the end."""
    options, where = Options(apart="2", outer=outer), site()
    plan = build_plan(where, Sizes(), options=options)
    (reduction,) = plan.traffic_of("sockets").reductions
    names = reduction.clusters if two_levels else ()
    reduction = replace(reduction, two_level_from=0, clusters=names, bucket_bytes=256)
    current = session.Session(options, Process(rank, 4, 0, 1, "", 0, "test"), where, plan, rank)
    session.set_active(current)

    def adopt(new):
        traffic = tuple(replace(one, reductions=(new,)) for one in plan.traffic)
        current.adopt(plan.sizes, replace(plan, traffic=traffic), sums=True)

    adopt(reduction)
    ours = model()
    optimizer, reducer = optimizer_of(ours, kind), GradientReducer(ours.named_parameters())
    found, reasons = [], []
    for step in range(STEPS):
        if step in (LEAVES, RETURNS):
            adopt(replace(reduction, apart=8 if step == LEAVES else 0))
        with reducer.overlapped():
            loss_of(ours, rank, step).backward()
        reasons.append(current.reductions[0, 1, 2, 3].why_not_apart)
        optimizer.step()
        optimizer.zero_grad()
        found.append(torch.cat([weight.detach().flatten() for weight in ours.parameters()]))
    states = [value for one in optimizer.state.values() for value in one.values()]
    reducer.close()
    session.set_active(None)
    return found, states, reasons


class Reference:
    """Two replicas, of a cluster each, in one process: every=8, fragments=2, delay=1."""

    def __init__(self, settings, kind):
        self.replicas = [model() for _ in CLUSTERS]
        self.optimizers = [optimizer_of(one, kind) for one in self.replicas]
        self.algorithm, self.sent = settings.outer_algorithm(), {}

    def halves(self, half):
        """A half's weights, by replica."""
        every = [list(one.parameters()) for one in self.replicas]
        return [weights[: len(weights) // 2] if half == 0 else weights[len(weights) // 2 :]
                for weights in every]

    def step(self, number):
        together = not LEAVES <= number < RETURNS
        if number == LEAVES:
            self.anchors = [[w.detach().clone() for w in self.halves(half)[0]] for half in (0, 1)]
            self.momenta = [[torch.zeros_like(w) for w in anchors] for anchors in self.anchors]
        self.gradients(number, together)
        within, half = (number - LEAVES) % 4 + 1, (number - LEAVES) // 4 % 2
        if not together and within == 3:
            self.capture(half)
        elif not together and within == 4:
            self.apply(half)
        elif number == RETURNS:
            self.back()
        for optimizer in self.optimizers:
            optimizer.step()
        return [torch.cat([w.detach().flatten() for w in one.parameters()]) for one in self.replicas]

    def gradients(self, number, together):
        for one, ranks in zip(self.replicas, CLUSTERS):
            one.zero_grad()
            (sum(loss_of(one, rank, number) for rank in ranks) / len(ranks)).backward()
        for pair in zip(*(one.parameters() for one in self.replicas)) if together else ():
            mean = (pair[0].grad + pair[1].grad) / 2
            for weight in pair:
                weight.grad.copy_(mean)

    def capture(self, half):
        self.sent[half] = [[w.detach().clone() for w in weights] for weights in self.halves(half)]

    @torch.no_grad()
    def apply(self, half, keep=True):
        sent = self.sent.pop(half)
        for place, (anchor, momentum) in enumerate(zip(self.anchors[half], self.momenta[half])):
            mean = sum(anchor - weights[place] for weights in sent) / 2
            self.algorithm.step(anchor, momentum, mean, self.algorithm.momentum_of([2, 2]))
            for weights, before in zip(self.halves(half), sent):
                mixed = self.algorithm.mixed(weights[place], before[place], anchor)
                weights[place].copy_(mixed if keep else anchor)

    @torch.no_grad()
    def back(self):
        for half in list(self.sent):
            self.apply(half)
        for half in (0, 1):
            self.capture(half)
            self.apply(half, keep=False)
        for pair in zip(*(one.parameters() for one in self.replicas)):
            states = [optimizer.state[weight] for optimizer, weight in zip(self.optimizers, pair)]
            for name in [name for name, value in states[0].items() if value is not None]:
                mean = (states[0][name] + states[1][name]) / 2
                for state in states:
                    state[name].copy_(mean)


@pytest.mark.parametrize("outer, kind, two_levels", [
    ("every=8,fragments=2,delay=1", "AdamW", True),
    ("every=8,fragments=2,delay=1,algorithm=average,mix=0.5", "SGD", False),
])  # fmt: skip
def test_clusters_go_apart_and_come_back(outer, kind, two_levels):
    reference = Reference(apart_settings(Options(apart="2", outer=outer)), kind)
    wanted = [reference.step(step) for step in range(STEPS)]
    answers = run_ranks(trained, 4, outer, kind, two_levels)
    for step in range(STEPS):
        of = [found[step] for found, _, _ in answers]
        assert torch.equal(of[0], of[1]) and torch.equal(of[2], of[3])
        assert torch.equal(of[0], of[2]) == (not LEAVES <= step < RETURNS), step
        for mine, cluster in zip((of[0], of[2]), wanted[step]):
            torch.testing.assert_close(mine, cluster, rtol=1e-4, atol=1e-6, msg=f"step {step}")
    for _, states, reasons in answers:
        assert all(map(torch.equal, states, answers[0][1]))
        assert reasons[0] and not any(reasons[1:])  # no optimizer was seen in the first step


@pytest.mark.parametrize("outer, said", [("compress=int8", "compress"), ("every=60s", "seconds"),
                                         ("rounds=async", "rounds")])
def test_what_only_joined_jobs_can_is_refused(outer, said):
    with pytest.raises(HolmesError, match=f"{said} is for jobs of --holmes-join"):
        apart_settings(Options(apart="2", outer=outer))


@pytest.mark.parametrize("given, said", [
    ({"apart": "2", "adapt": "off"}, "--holmes-apart needs --holmes-adapt on"),
    ({"apart": "2", "join": "a@127.0.0.1:1"}, "cannot be combined with --holmes-join"),
    ({"outer": "every=8"}, "give --holmes-join .* or --holmes-apart too"),
])  # fmt: skip
def test_flags_that_do_not_go_together(given, said):
    with pytest.raises(HolmesError, match=said):
        training.request(Options(**given))
