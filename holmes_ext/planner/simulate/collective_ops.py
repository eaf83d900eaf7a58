"""Operations that start collectives and wait for them, in the program of a simulated rank.

events.py runs the programs, and describes the format of operations.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from holmes_ext.plan.cost.reductions import ZERO_GRADIENTS, Tag
from holmes_ext.planner.simulate.collectives import Collectives
from holmes_ext.planner.simulate.events import AS_RECEIVER, AS_SENDER, NO_CHUNK, NO_MICRO_BATCH, Op

#: Layer -> operations.
Operations = dict[int, list[Op]]


class PassOperations(NamedTuple):
    """Operations that a rank inserts into a pass to start collectives and to wait for them.

    along() makes it. The collectives are gradient reductions and ZeRO's gathers and scatters. Both
    fields map a layer to operations (formats: events.py).
    """

    needs: Operations  # before a layer, such as waiting for its weights
    launches: Operations  # after a layer, such as sending its gradients


@dataclass(frozen=True)
class _ShardedPass:
    """Collectives of the layers in one pass of a rank under ZeRO 2 and 3.

    A layer is given by its index in `layers`. A collective is one of these:

        weights    gather of the layer's weights
        scatter    reduce-scatter of its gradients among the ranks that share a copy of the model
        across     sum of its gradients between clusters, if each cluster has a copy of the model
                   (hybrid sharding)
    """

    transfers: Container[Hashable]  # keys of all collectives of the step
    stage: int
    layers: list[int]  # in the order of the pass
    letter: str  # "F" for a forward pass, "B" for a backward pass
    micro_batch: int
    #: Classes of the pipelines whose ranks share a copy of the model, and of those that sum gradients.
    sharing_classes: Hashable
    summing_classes: Hashable

    def weights(self, index: int) -> list[Op]:
        """Return the simulated operations that gather a layer's weights right before the layer computes.

        The gather does not overlap with computation: its end is awaited at once.
        """
        return [*self._post("weights", index), *self._wait("weights", index)]

    def prefetched_weights(self, index: int) -> list[Op]:
        """Return the operations before a layer: await its weights, and start the next layer's gather."""
        ops = []
        if index == 0:  # there is no earlier layer that could have started the gather
            ops += self._post("weights", index)
        ops += self._wait("weights", index)
        ops += self._post("weights", index + 1)
        return ops

    def gradients(self, index: int) -> list[Op]:
        """Return the simulated operations that sum a layer's gradients right after its backward pass.

        The sum does not overlap with computation: its end is awaited at once.
        """
        return [
            *self._post("scatter", index),
            *self._wait("scatter", index),
            *self._post("across", index),
            *self._wait("across", index),
        ]

    def overlapped_gradients(self, index: int) -> list[Op]:
        """Return the operations after a layer's backward pass, for sums that overlap with computation.

        A layer's gradients are summed in two steps: a reduce-scatter ("scatter"), and then a sum
        between clusters ("across"). The reduce-scatter is started after the layer itself. One layer
        later its end is awaited, and the sum between clusters is started. After the last layer of
        the pass, all that are still on their way are awaited.
        """
        is_first = index == 0
        is_last = index == len(self.layers) - 1
        scattered = []  # layers whose reduce-scatter is awaited now
        if not is_first:
            scattered.append(index - 1)
        if is_last:
            scattered.append(index)  # no later layer can wait for it
        ops = self._post("scatter", index)
        for layer_index in scattered:
            ops += self._wait("scatter", layer_index)
            ops += self._post("across", layer_index)
        if is_last:
            for layer_index in range(len(self.layers)):
                ops += self._wait("across", layer_index)
        return ops

    def _post(self, collective: str, index: int) -> list[Op]:
        """Return the operation that starts a layer's collective; [] if there is none."""
        tag = self._tag(collective, index)
        return [("post", (tag, self.micro_batch))] if tag else []

    def _wait(self, collective: str, index: int) -> list[Op]:
        """Return the operation that waits for a layer's collective; [] if there is none."""
        tag = self._tag(collective, index)
        span_kind = "gather" if collective == "weights" else "reduce"
        return [("wait", (tag, self.micro_batch), span_kind, self.micro_batch)] if tag else []

    def _tag(self, collective: str, index: int) -> Tag | None:
        """Return the key of a layer's collective in `transfers`; None if there is none.

        The key is (collective, stage, pipeline classes, layer). For "weights" the letter of the
        pass follows. The pipeline classes are those whose ranks take part in the collective.

        Args:
            collective: "weights", "scatter" or "across".
            index: Index of the layer; if it is outside of `layers`, there is no such layer.
        """
        if not 0 <= index < len(self.layers):
            return None
        pipeline_classes = self.sharing_classes
        if collective == "across":
            pipeline_classes = self.summing_classes
        tag: Tag = (collective, self.stage, pipeline_classes, self.layers[index])
        if collective == "weights":
            tag = (*tag, self.letter)
        return tag if tag in self.transfers else None


class CollectiveOps(Collectives):
    """Operations of collectives in the program of a rank.

    A rank calls before() at the step's start, along() for each pass, after() once its last pass is
    over, and report() at the step's end. In all of them `pipeline_class` is the class of the rank's
    pipeline: all pipelines on equal nodes. Their ranks do the same.
    """

    def _post(self, tag: Tag) -> list[Op]:
        """Return the operations with which a rank of the simulation starts a collective.

        A rank posts a transfer when it is ready for it. A collective may be a single transfer. Or its
        bytes are divided into pieces, and each piece passes a chain of transfers, such as the steps
        of a hierarchical all-reduce. Then the rank posts the first transfer of each chain; the end of
        a transfer starts the next one.

        Args:
            tag: Key of the collective.
        """
        return [("post", name) for name in self.starts.get(tag, [tag])]

    @staticmethod
    def _post_and_wait(tag: object, span_kind: str) -> Iterator[Op]:
        """Yield the start of a collective and the wait for it.

        Args:
            tag: Key of the collective's transfer.
            span_kind: Kind of the span (Span.kind) that records the wait.
        """
        yield ("post", tag)
        yield ("wait", tag, span_kind, NO_MICRO_BATCH)

    def before(self, pipeline_class: int, stage: int) -> list[Op]:
        """Return the operations before a step's first pass: the start of ZeRO 1's weight gathers.

        The result is empty unless the gathers overlap with the first forward pass (late_gather).
        They gather the weights that the last step's optimizer changed, a bucket at a time. Buckets
        are numbered as the backward pass fills them, from the last layer to the first. The forward
        pass needs them in the opposite order.

        Args:
            pipeline_class: Class of the rank's pipeline: all pipelines on equal nodes.
            stage: The rank's stage.
        """
        if not self.late_gather:
            return []
        # _tags(): keys of the stage's gathers, in the order of the backward pass
        tags = reversed(self._tags(pipeline_class, stage, "gather"))
        return [op for tag in tags for op in self._post(tag)]

    def along(
        self,
        pipeline_class: int,
        stage: int,
        chunk: int,
        letter: str,
        micro_batch: int,
        final: bool,
    ) -> PassOperations:
        """Return the operations that start or await collectives during a pass, by layer.

        The last micro-batch's backward pass starts the reduction of each bucket of gradients after
        the layer that fills it. The first micro-batch's forward pass waits before a layer for its
        weights, if ZeRO 1 gathers them in that pass (gather_overlap). ZeRO 2 and 3 have collectives
        in every pass (_along_shards).

        Args:
            pipeline_class: Class of the rank's pipeline (those on equal nodes).
            stage: The rank's stage.
            chunk: Chunk of the pass.
            letter: "F" for a forward pass, "B" or "W" for a backward pass.
            micro_batch: Micro-batch of the pass.
            final: The pass is the last micro-batch's backward pass.
        """
        needs: Operations = {}
        launches: Operations = {}
        if self.run.zero >= ZERO_GRADIENTS and (pipeline_class, stage) in self.groups:
            return self._along_shards(pipeline_class, stage, letter, micro_batch)
        awaits_gathers = self.late_gather and letter == "F" and micro_batch == 0
        if not final and not awaits_gathers:
            return PassOperations(needs, launches)

        # A group: buckets of gradients that are sent together, after the layer `group.after`.
        for number, group in enumerate(self.bucket_groups.get((pipeline_class, stage), [])):
            # Layers of this pass's chunk with gradients in the group's buckets.
            layers = [item.layer for item in group.chunk_layers if item.chunk == chunk]
            if layers and letter == "F":
                # The first of the layers waits for the weights of all of them.
                gather = self._tag(pipeline_class, stage, "gather", number)
                needs.setdefault(min(layers), []).append(("wait", gather, "gather", micro_batch))
            if final and group.after:  # the buckets are full after this layer's backward pass
                last_chunk, last_layer = group.after
                if last_chunk == chunk:
                    reduction = self._tag(pipeline_class, stage, "reduce", number)
                    launches[last_layer] = self._post(reduction)
        return PassOperations(needs, launches)

    def _along_shards(
        self, pipeline_class: int, stage: int, letter: str, micro_batch: int
    ) -> PassOperations:
        """Return the operations that start or await collectives in a pass under ZeRO 2 and 3.

        ZeRO 3 gathers a layer's weights before the layer computes. The backward pass
        reduce-scatters the layer's gradients after it. Without prefetch the pass starts such a
        collective and waits for it at once. With prefetch it overlaps with the computation of
        another layer:

            weights      the gather starts before the previous layer computes
            gradients    the wait for the reduce-scatter comes after the next layer has computed

        Args:
            pipeline_class: Class of the rank's pipeline: all pipelines on equal nodes.
            stage: The rank's stage.
            letter: "F" for a forward pass, "B" for a backward pass.
            micro_batch: Micro-batch of the pass.
        """
        layers = list(range(*self.ranges[stage]))
        if letter == "B":
            layers.reverse()
        collectives = _ShardedPass(
            transfers=self.transfers,
            stage=stage,
            layers=layers,
            letter=letter,
            micro_batch=micro_batch,
            sharing_classes=self.shards[pipeline_class, stage].pipeline_classes,
            summing_classes=self.groups[pipeline_class, stage].pipeline_classes,
        )
        needs: Operations = {}
        launches: Operations = {}
        for index, layer in enumerate(layers):
            if self.run.prefetch:
                needs[layer] = collectives.prefetched_weights(index)
            else:
                needs[layer] = collectives.weights(index)
            if letter != "B":
                continue
            if self.run.prefetch:
                launches[layer] = collectives.overlapped_gradients(index)
            else:
                launches[layer] = collectives.gradients(index)
        return PassOperations(needs, launches)

    def after(self, pipeline_class: int, stage: int) -> Iterator[Op]:
        """Yield a rank's operations after its last pass: remaining reductions, optimizer, weight gather.

        The weights are gathered here under ZeRO 1 and 2, unless that overlaps with the next forward
        pass. ZeRO 3 gathers them before each pass, and ZeRO 0 has all weights on each rank.

        Args:
            pipeline_class: Class of the rank's pipeline: all pipelines on equal nodes.
            stage: The rank's stage.
        """
        reductions = [self._reduce(pipeline_class, stage), self._reduce_tied(pipeline_class, stage)]
        if self.run.engine.tied_first:
            reductions.reverse()
        for ops in reductions:
            yield from ops
        if ("norm", pipeline_class) in self.transfers:
            yield from self._post_and_wait(("norm", pipeline_class), span_kind="reduce")
        optimizer_s = self._optimizer_s(pipeline_class, stage)
        yield ("software", "optimizer", optimizer_s, NO_MICRO_BATCH, NO_CHUNK)
        if self.run.zero in (1, 2) and not self.late_gather:
            for tag in self._tags(pipeline_class, stage, "gather"):
                yield from self._post_and_wait(tag, "gather")

    def _optimizer_s(self, pipeline_class: int, stage: int) -> float:
        """Return the seconds of the optimizer for a rank's parameters, or for its shard of them.

        Args:
            pipeline_class: Class of the rank's pipeline: all pipelines on equal nodes.
            stage: The rank's stage.
        """
        shards = 1  # ranks that share the parameters
        if self.run.zero:
            # Groups that shard: under ZeRO 2 and 3 those in `shards` (hybrid sharding: of a
            # cluster), under ZeRO 1 those that sum the gradients.
            groups = self.shards or self.groups
            if (pipeline_class, stage) in groups:
                shards = groups[pipeline_class, stage].ranks

        # All chunks of the stage: chunk c is at c x stages + stage.
        parameters = sum(
            self.parameters[layer]
            for low, high in self.ranges[stage :: self.stages]
            for layer in range(low, high)
        )
        return self.run.parameter_s * parameters / shards

    def report(self, pipeline_class: int, stage: int) -> Iterator[Op]:
        """Yield the operations at the step's end: the loss, and sums of the training script.

        The engine averages the loss over the last stage's ranks, and sends it to the other stages.
        A training script may sum further numbers over each stage's ranks, such as counts of tokens
        (run.sums).

        Args:
            pipeline_class: Class of the rank's pipeline: all pipelines on equal nodes.
            stage: The rank's stage.
        """
        has_group = (pipeline_class, stage) in self.groups
        if has_group:
            average = self._tag(pipeline_class, stage, "average", 0)
            if average in self.transfers:
                yield from self._post_and_wait(average, "reduce")
        yield from self._loss(pipeline_class, stage)
        if has_group:
            for number in range(self.run.sums):
                yield from self._post_and_wait(
                    self._tag(pipeline_class, stage, "sum", number), "reduce"
                )

    def _loss(self, pipeline_class: int, stage: int) -> list[Op]:
        """Return the operations by which the last stage sends the loss to all other stages.

        The last stage has a wait for each message, which ends when all its bytes have left. Every
        other stage has a wait for its own message, which ends when the message has arrived.

        Args:
            pipeline_class: Class of the rank's pipeline: all pipelines on equal nodes.
            stage: The rank's stage.
        """
        last = self.stages - 1
        own_tag = ("loss", pipeline_class, stage)  # of the message that this stage receives
        if stage < last and own_tag in self.transfers:
            # "send": the time counts as sending, on the receiver, too.
            return [("post", own_tag, AS_RECEIVER), ("wait", own_tag, "send", NO_MICRO_BATCH)]
        tags = [("loss", pipeline_class, receiver) for receiver in range(last)]
        tags = [tag for tag in tags if tag in self.transfers]
        posts: list[Op] = [("post", tag) for tag in tags]
        waits: list[Op] = [("wait", tag, "send", NO_MICRO_BATCH, AS_SENDER) for tag in tags]
        return posts + waits

    def _reduce(self, pipeline_class: int, stage: int) -> list[Op]:
        """Return the operations that complete a stage's gradient reductions after its last pass.

        Buckets that were filled during the pass were already posted (started) then. The others are
        posted here; after that comes a wait for each.

        Args:
            pipeline_class: Number of the rank's class of pipelines: all pipelines on equal nodes.
            stage: The rank's stage.
        """
        if self.run.zero >= ZERO_GRADIENTS:
            return []
        tags = self._tags(pipeline_class, stage, "reduce")
        ops: list[Op] = []
        for tag, group in zip(tags, self.bucket_groups.get((pipeline_class, stage), [])):
            if group.after is None:  # sent after the whole backward pass
                ops += self._post(tag)
        return ops + [("wait", tag, "reduce", NO_MICRO_BATCH) for tag in tags]

    def _reduce_tied(self, pipeline_class: int, stage: int) -> list[Op]:
        """Return the operations of the tied embedding's reduction between first and last stage.

        Args:
            pipeline_class: Number of the rank's class of pipelines: all pipelines on equal nodes.
            stage: The rank's stage; empty result for stages without the embedding.
        """
        if pipeline_class not in self.tied or stage not in (0, self.stages - 1):
            return []
        return [
            *self._post(self.tied[pipeline_class]),
            ("wait", self.tied[pipeline_class], "reduce", NO_MICRO_BATCH),
        ]

    def _tag(self, pipeline_class: int, stage: int, collective: str, number: int) -> Tag:
        """Return the key of a collective's transfer: (name, stage, pipeline classes, number).

        Args:
            pipeline_class: A class of pipelines on equal nodes whose ranks take part.
            stage: Number of the stage.
            collective: Name of the collective, such as "reduce".
            number: Number of the group of buckets.
        """
        return (collective, stage, self.groups[pipeline_class, stage].pipeline_classes, number)

    def _tags(self, pipeline_class: int, stage: int, collective: str) -> list[Tag]:
        """Return the keys of a stage's transfers of a collective, with a key for each bucket group."""
        numbers = range(len(self.bucket_groups.get((pipeline_class, stage), [])))
        return [self._tag(pipeline_class, stage, collective, number) for number in numbers]
