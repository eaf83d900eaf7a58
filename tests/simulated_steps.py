"""Steps of two stages, simulated, as the ranks' recorders and reports tell of them. For tests."""

from clusters import site

from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.stages import StageCosts
from holmes_ext.plan.engine import POSTED, EngineTraits
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.simulate.execution import Execution
from holmes_ext.planner.simulate.step import simulate


def step_of(case, held, micro_batches, slower=1.0):
    """Simulate one step, and return the passes of each stage.

    case: layers of each stage, seconds of a layer's forward on the first stage (the second takes
    1.3 times that, or `slower` times), Mb/s.

    Returns:
        for each stage: (letter, micro-batch) -> (span, whether the pass was waited for)
    """
    layers, each, rate = case
    model = Model(6, 64, 4, 128, 256, micro_batches=micro_batches, activation_width=4)
    row = tuple((0.0, *(each * factor,) * 6, 0.0) for factor in (1.0, 1.3 * slower))
    none = ((0.0,) * 8,) * 2
    costs = StageCosts(
        row, tuple(tuple(2 * one for one in own) for own in row), none, none, micro_batches
    )
    run = Execution(EngineTraits(sends=POSTED), stage_layers=layers, in_flight=held)
    step = simulate(
        site(ethernet=f"{rate}Mb/s"), ("a0", "a1", "b0", "b1"), Sizes(2), model, run, costs=costs
    )
    found = {}
    for line in step.ranks:
        passes = found.setdefault(line.stage, {})
        for number, span in enumerate(line.spans):
            if span.kind in ("forward", "backward"):
                before = line.spans[number - 1] if number else None
                passes[span.kind[0], span.micro_batch] = (
                    span,
                    bool(before and before.kind == "send"),
                )
    return found
