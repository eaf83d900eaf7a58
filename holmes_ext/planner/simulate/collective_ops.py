"""Operations of a rank's program that start collectives and wait for them (formats: events.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from holmes_ext.plan.cost.reductions import Tag
from holmes_ext.planner.simulate.collectives import Collectives
from holmes_ext.planner.simulate.events import Op

#: Layer -> operations.
Operations = dict[int, list[Op]]
#: ZeRO stage that shards gradients, which are then sent for each micro-batch.
ZERO_GRADIENTS = 2


class PassOperations(NamedTuple):
    """Collective operations during one pass."""

    needs: Operations  # before a layer, such as waiting for its weights
    launches: Operations  # after a layer, such as sending its gradients


class CollectiveOps(Collectives):
    """Operations of collectives in the program of a rank.

    A rank calls before() at the step's start, along() for each pass, after() once its last pass is over, and
    report() at the step's end. In all of them `kind` is the kind of the rank's pipeline.
    """

    def _post(self, tag: Tag) -> list[Op]:
        """Return the posts (starts) of a collective: of the first transfer of each of its chains."""
        return [("post", name) for name in self.starts.get(tag, [tag])]

    @staticmethod
    def _post_and_wait(tag: object, kind: str) -> Iterator[Op]:
        yield ("post", tag)
        yield ("wait", tag, kind, -1)

    def before(self, kind: int, stage: int) -> list[Op]:
        """Return the gathers at the step's start: the last step's weights, in order of the forward pass."""
        if not self.late_gather:
            return []
        tags = reversed(self._tags(kind, stage, "gather"))
        return [op for tag in tags for op in self._post(tag)]

    def along(
        self, kind: int, stage: int, chunk: int, letter: str, micro_batch: int, final: bool
    ) -> PassOperations:
        """Return the operations of one pass: gathers awaited before layers, buckets sent after layers.

        Args:
            kind: Kind of the rank's pipeline.
            stage: The rank's stage.
            chunk: Chunk of the pass.
            micro_batch: Micro-batch of the pass.
            letter: "F" for a forward pass, "B" or "W" for a backward pass.
            final: The pass is the last micro-batch's backward pass.
        """
        needs: Operations = {}
        launches: Operations = {}
        if self.run.zero >= ZERO_GRADIENTS and (kind, stage) in self.groups:
            return self._along_shards(kind, stage, letter, micro_batch)
        awaits_gathers = self.late_gather and letter == "F" and micro_batch == 0
        if not final and not awaits_gathers:
            return PassOperations(needs, launches)
        for number, buckets in enumerate(self.leaving.get((kind, stage), [])):
            layers = [layer for part, layer in buckets.places if part == chunk]
            if layers and letter == "F":
                # The first of the layers waits for the weights of all of them.
                gather = self._tag(kind, stage, "gather", number)
                needs.setdefault(min(layers), []).append(("wait", gather, "gather", 0))
            if final and buckets.after:  # the buckets are full after this layer's backward pass
                last_chunk, last_layer = buckets.after
                if last_chunk == chunk:
                    reduction = self._tag(kind, stage, "reduce", number)
                    launches[last_layer] = self._post(reduction)
        return PassOperations(needs, launches)

    def _along_shards(self, kind: int, stage: int, letter: str, micro_batch: int) -> PassOperations:
        """Return the operations of one pass under ZeRO 2 and 3.

        Each layer waits for its weights before the pass, and its gradients are scattered after a backward
        pass. Without prefetch both are awaited at once. With prefetch the next layer's weights are sent
        before a layer, and its gradients are awaited after the next layer.
        """
        needs: Operations = {}
        launches: Operations = {}
        shards = self.shards[kind, stage]
        group = self.groups[kind, stage]
        layers = list(range(*self.ranges[stage]))
        if letter == "B":
            layers.reverse()

        def tag_of(collective: str, index: int) -> Tag | None:
            """Return the tag of a layer's collective; None if there is no such layer or collective."""
            if not 0 <= index < len(layers):
                return None
            pipelines = (
                group.pipeline_classes if collective == "across" else shards.pipeline_classes
            )
            tag: Tag = (collective, stage, pipelines, layers[index])
            if collective == "weights":
                tag = (*tag, letter)
            return tag if tag in self.transfers else None

        def post(collective: str, index: int) -> list[Op]:
            tag = tag_of(collective, index)
            return [("post", (tag, micro_batch))] if tag else []

        def wait(collective: str, index: int) -> list[Op]:
            tag = tag_of(collective, index)
            span_kind = "gather" if collective == "weights" else "reduce"
            return [("wait", (tag, micro_batch), span_kind, micro_batch)] if tag else []

        prefetch = self.run.prefetch
        last = len(layers) - 1
        for index, layer in enumerate(layers):
            if prefetch:
                first = post("weights", 0) if index == 0 else []  # no layer before it has sent them
                needs[layer] = [*first, *wait("weights", index), *post("weights", index + 1)]
            else:
                needs[layer] = [*post("weights", index), *wait("weights", index)]
            if letter != "B":
                continue
            ops = post("scatter", index)
            if prefetch:
                # The layer before, and after the last layer that layer itself, have had time to arrive.
                scattered = [index - 1, index] if index == last else [index - 1]
                for earlier in scattered:
                    ops += [*wait("scatter", earlier), *post("across", earlier)]
                if index == last:
                    for earlier in range(len(layers)):
                        ops += wait("across", earlier)
            else:
                ops += wait("scatter", index)
                ops += [*post("across", index), *wait("across", index)]
            launches[layer] = ops
        return PassOperations(needs, launches)

    def after(self, kind: int, stage: int) -> Iterator[Op]:
        """Yield the operations after the last pass: remaining reductions, optimizer, weight gather."""
        reductions = [self._reduce(kind, stage), self._reduce_tied(kind, stage)]
        if self.run.engine.tied_first:
            reductions.reverse()
        for ops in reductions:
            yield from ops
        if ("norm", kind) in self.transfers:
            yield from self._post_and_wait(("norm", kind), "reduce")
        yield ("software", "optimizer", self._optimizer_s(kind, stage), -1, 0)
        if self.run.zero in (1, 2) and not self.late_gather:
            for tag in self._tags(kind, stage, "gather"):
                yield from self._post_and_wait(tag, "gather")

    def _optimizer_s(self, kind: int, stage: int) -> float:
        """Return the seconds of the optimizer for a rank's parameters, or for its shard of them."""
        shards = 1  # ranks that share the parameters
        if self.run.zero:
            groups = self.shards or self.groups
            if (kind, stage) in groups:
                shards = groups[kind, stage].ranks
        # All chunks of the stage: chunk c is at c x stages + stage.
        parameters = sum(
            self.parameters[layer]
            for low, high in self.ranges[stage :: self.stages]
            for layer in range(low, high)
        )
        return self.run.parameter_s * parameters / shards

    def report(self, kind: int, stage: int) -> Iterator[Op]:
        """Yield the operations at the step's end: the loss, and sums that the script makes itself."""
        has_group = (kind, stage) in self.groups
        if has_group:
            average = self._tag(kind, stage, "average", 0)
            if average in self.transfers:
                yield from self._post_and_wait(average, "reduce")
        yield from self._loss(kind, stage)
        if has_group:
            for number in range(self.run.sums):
                yield from self._post_and_wait(self._tag(kind, stage, "sum", number), "reduce")

    def _loss(self, kind: int, stage: int) -> list[Op]:
        """Return a rank's operations for the loss, which the last stage sends to all others."""
        last = self.stages - 1
        if stage < last and ("loss", kind, stage) in self.transfers:
            tag = ("loss", kind, stage)
            return [("post", tag, True), ("wait", tag, "send", -1)]  # True: as the receiver
        # On the last stage: a message to each of the others.
        tags = [("loss", kind, other) for other in range(last)]
        tags = [tag for tag in tags if tag in self.transfers]
        posts: list[Op] = [("post", tag) for tag in tags]
        waits: list[Op] = [("wait", tag, "send", -1, True) for tag in tags]
        return posts + waits

    def _reduce(self, kind: int, stage: int) -> list[Op]:
        """Return the posts (starts) of reductions that did not start under a pass, and waits for all."""
        if self.run.zero >= ZERO_GRADIENTS:
            return []
        tags = self._tags(kind, stage, "reduce")
        ops: list[Op] = []
        for tag, buckets in zip(tags, self.leaving.get((kind, stage), [])):
            if buckets.after is None:
                ops += self._post(tag)
        return ops + [("wait", tag, "reduce", -1) for tag in tags]

    def _reduce_tied(self, kind: int, stage: int) -> list[Op]:
        """Return the operations of the tied embedding's reduction between first and last stage."""
        if kind not in self.tied or stage not in (0, self.stages - 1):
            return []
        return [*self._post(self.tied[kind]), ("wait", self.tied[kind], "reduce", -1)]

    def _tag(self, kind: int, stage: int, collective: str, number: int) -> Tag:
        return (collective, stage, self.groups[kind, stage].pipeline_classes, number)

    def _tags(self, kind: int, stage: int, collective: str) -> list[Tag]:
        numbers = range(len(self.leaving.get((kind, stage), [])))
        return [self._tag(kind, stage, collective, number) for number in numbers]
