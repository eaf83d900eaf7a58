"""The least step of one placement with the stages' last backwards one after the other: closer than each stage
alone (planner/bound/least.py), and a split that it leaves."""

from __future__ import annotations

from holmes_ext.planner.bound.least import StepLowerBound

#: The bound is found up to this fraction.
NEAR = 2e-4


class ChainBound(StepLowerBound):
    """Of one placement; costs: of the simulation."""

    def chained(self, low: float, known: float) -> tuple[float, tuple[int, ...]]:
        """A bound between `low` and `known` (seconds), with the stages' last backwards one after the other,
        and a split that it leaves possible; (`known`, ()) where no split can take less than `known`."""
        split = self._chain(known)
        if not split:
            return known, ()
        while known - low > NEAR * low:
            middle = (low + known) / 2
            if closer := self._chain(middle):
                split, known = closer, middle
            else:
                low = middle
        return low, split

    def _chain(self, step_s: float) -> tuple[int, ...]:
        """A split that could take no longer; () where there is none."""
        return next(filter(None, (self._chain_of(step_s, *level) for level in self.levels)), ())

    def _chain_of(self, step_s: float, rest_s: float, limit_s: float) -> tuple[int, ...]:
        """The same within one of _levels. From the last stage up, for each number of layers that the stages
        below hold, the least moment at which the last backward of a stage can end: after its own passes, or
        that of the next stage and the stage link between, or once that one's NIC has sent all."""
        if (most := self._room(step_s, rest_s, limit_s)) is None:
            return ()
        ends, choices, over = {0: 0.0}, [], sum(most)
        for stage in reversed(range(self.count)):
            over -= most[stage]
            stage_choices = self._chain_stage(stage, most[stage], ends, over, step_s, rest_s)
            ends = {below: moment for below, (moment, _, _) in stage_choices.items()}
            choices.append(stage_choices)
        below, split = self.layers, []
        for stage_choices in reversed(choices):
            if below not in stage_choices:
                return ()
            _, layers, below = stage_choices[below]
            split.append(layers)
        return tuple(split)

    def _chain_stage(
        self, stage: int, most: int, ends: dict[int, float], over: int, step_s: float, rest_s: float
    ) -> dict[int, tuple[float, int, int]]:
        """Layers here and below -> (least moment, layers here, layers below). over: that stages above can
        hold."""
        f, b, extra_b = self.forward[stage], self.backward[stage], self.extra_backward[stage]
        last = stage == self.count - 1
        stage_link = 0.0 if last else self.stage_links[stage]
        slope = self.more_down[stage] if stage else 0.0
        fixed, sent = self.down[stage] + self.there[stage], self.m * self.sent[stage]
        down = (
            fixed
            + self.extra_forward[stage]
            + sent
            - (self.stage_links[stage - 1] if stage else 0.0)
        )
        passes = [self._passes(stage, layers) for layers in range(most + 1)]
        after = [self._left(stage, layers, rest_s) for layers in range(most + 1)]
        result: dict[int, tuple[float, int, int]] = {}
        for held, end in ends.items():
            room, spare = self.layers - held, held - (self.count - 1 - stage)
            below = self.below[stage] + (spare * self.more_below[stage] if spare else 0.0)
            for n in range(max(1, room - over), min(most, room - stage) + 1):
                alone, once, rounds_s, rounds = passes[n]
                more = slope * (room - n - stage)
                moment = (
                    max(alone + below, once + 2 * below, rounds_s + (rounds + 1) * below)
                    + fixed
                    + more
                )
                before = self.flowed[stage] if last else end + stage_link + extra_b
                moment = max(moment, before + b * n)
                if moment + after[n] <= step_s:
                    if sent:  # its NIC is done, a stage link before
                        moment = max(moment, down + f * n + more)
                    if held + n not in result or moment < result[held + n][0]:
                        result[held + n] = moment, n, held
        return result
