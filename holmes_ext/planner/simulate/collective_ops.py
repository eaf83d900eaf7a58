"""When a rank posts what is summed and gathered, and awaits it."""

from __future__ import annotations

from collections.abc import Iterator

from holmes_ext.plan.cost.reductions import Tag
from holmes_ext.planner.simulate.collectives import Collectives
from holmes_ext.planner.simulate.events import Op

#: By layer.
Operations = dict[int, list[Op]]


class CollectiveOps(Collectives):
    """before, along, after, report: the operations of an actor's program."""

    def _post(self, tag: Tag) -> list[Op]:
        return [("post", name) for name in self.starts.get(tag, [tag])]

    def before(self, kind: int, stage: int) -> list[Op]:
        """At the step's start: the last step's weights are gathered, in the order of the forward pass."""
        tags = reversed(self._tags(kind, stage, "gather")) if self.late_gather else ()
        return [op for tag in tags for op in self._post(tag)]

    def along(
        self, kind: int, stage: int, chunk: int, letter: str, micro_batch: int, final: bool
    ) -> tuple[Operations, Operations]:
        """Of one pass, by layer: what comes before it (awaited gathers) and after it (buckets that leave)."""
        needs: Operations = {}
        launches: Operations = {}
        if self.run.zero > 1 and (kind, stage) in self.groups:
            return self._along_shards(kind, stage, letter, micro_batch)
        if not final and not (self.late_gather and letter == "F" and micro_batch == 0):
            return needs, launches
        for number, buckets in enumerate(self.leaving.get((kind, stage), [])):
            of_chunk = [layer for part, layer in buckets.places if part == chunk]
            if of_chunk and letter == "F":
                gathered = self._tag(kind, stage, "gather", number)
                needs.setdefault(min(of_chunk), []).append(("wait", gathered, "gather", 0))
            if final and buckets.after and buckets.after[0] == chunk:
                launches[buckets.after[1]] = self._post(self._tag(kind, stage, "reduce", number))
        return needs, launches

    def _along_shards(
        self, kind: int, stage: int, letter: str, micro_batch: int
    ) -> tuple[Operations, Operations]:
        """Of ZeRO 2 and 3: each layer's weights before it, its gradients after it, and both awaited; with
        prefetch the next layer's weights leave before a layer, its gradients are awaited after the next."""
        needs: Operations = {}
        launches: Operations = {}
        shards, whole = self.shards[kind, stage], self.groups[kind, stage]
        layers = range(*self.ranges[stage])[:: -1 if letter == "B" else 1]

        def of_layer(what: str, place: int, *kinds: str) -> list[Op]:
            """Where the pass has so many layers."""
            if not 0 <= place < len(layers):
                return []
            pipelines = whole.pipelines if what == "across" else shards.pipelines
            name: Tag = (
                what,
                stage,
                pipelines,
                layers[place],
                *([letter] if what == "weights" else []),
            )
            awaited = "gather" if what == "weights" else "reduce"
            every: dict[str, Op] = {
                "post": ("post", (name, micro_batch)),
                "wait": ("wait", (name, micro_batch), awaited, micro_batch),
            }
            return [every[kind] for kind in kinds] if name in self.transfers else []

        ahead = int(self.run.prefetch)
        for place, layer in enumerate(layers):
            first = of_layer("weights", 0, "post") if ahead and not place else []
            needs[layer] = [
                *first,
                *of_layer("weights", place, *() if ahead else ("post",), "wait"),
            ]
            if ahead:
                needs[layer] += of_layer("weights", place + 1, "post")
            if letter != "B":
                continue
            launches[layer] = of_layer("scatter", place, "post")
            for done in (place - 1,) * ahead + (place,) * (not ahead or layer == layers[-1]):
                launches[layer] += [
                    *of_layer("scatter", done, "wait"),
                    *of_layer("across", done, "post"),
                ]
                launches[layer] += of_layer("across", done, "wait") if not ahead else []
            if ahead and layer == layers[-1]:
                launches[layer] += [
                    op for at in range(len(layers)) for op in of_layer("across", at, "wait")
                ]
        return needs, launches

    def after(self, kind: int, stage: int) -> Iterator[Op]:
        """After the last pass: what is left of the reductions, the optimizer, the gather."""
        steps = [self._reduce(kind, stage), self._tie(kind, stage)]
        for ops in reversed(steps) if self.run.engine.tied_first else steps:
            yield from ops
        if ("norm", kind) in self.transfers:
            yield from (("post", ("norm", kind)), ("wait", ("norm", kind), "reduce", -1))
        owners_of = (self.shards or self.groups) if self.run.zero else {}
        share = owners_of[kind, stage].ranks if (kind, stage) in owners_of else 1
        ranges = self.ranges[stage :: self.stages]
        parameters = sum(
            self.parameters[layer] for low_high in ranges for layer in range(*low_high)
        )
        yield ("software", "optimizer", self.run.parameter_s * parameters / share, -1, 0)
        if self.run.zero in (1, 2) and not self.late_gather:
            for tag in self._tags(kind, stage, "gather"):
                yield from (("post", tag), ("wait", tag, "gather", -1))

    def report(self, kind: int, stage: int) -> Iterator[Op]:
        """The loss, and what the script sums: the end of all."""
        if (kind, stage) in self.groups and (
            tag := self._tag(kind, stage, "average", 0)
        ) in self.transfers:
            yield from (("post", tag), ("wait", tag, "reduce", -1))
        yield from self._loss(kind, stage)
        for number in range(self.run.sums if (kind, stage) in self.groups else 0):
            tag = self._tag(kind, stage, "sum", number)
            yield from (("post", tag), ("wait", tag, "reduce", -1))

    def _loss(self, kind: int, stage: int) -> list[Op]:
        last = self.stages - 1
        if stage < last and ("loss", kind, stage) in self.transfers:
            return [
                ("post", ("loss", kind, stage), True),
                ("wait", ("loss", kind, stage), "send", -1),
            ]
        tags = [
            ("loss", kind, other)
            for other in range(last)
            if ("loss", kind, other) in self.transfers
        ]
        posts: list[Op] = [("post", tag) for tag in tags]
        return [*posts, *(("wait", tag, "send", -1, True) for tag in tags)]

    def _reduce(self, kind: int, stage: int) -> list[Op]:
        tags = self._tags(kind, stage, "reduce") if self.run.zero < 2 else []
        every = zip(tags, self.leaving.get((kind, stage), []))
        late = [tag for tag, buckets in every if buckets.after is None]
        posts = [op for tag in late for op in self._post(tag)]
        return posts + [("wait", tag, "reduce", -1) for tag in tags]

    def _tie(self, kind: int, stage: int) -> list[Op]:
        if kind not in self.tied or stage not in (0, self.stages - 1):
            return []
        return [*self._post(self.tied[kind]), ("wait", self.tied[kind], "reduce", -1)]

    def _tag(self, kind: int, stage: int, what: str, number: int) -> Tag:
        return (what, stage, self.groups[kind, stage].pipelines, number)

    def _tags(self, kind: int, stage: int, what: str) -> list[Tag]:
        numbers = range(len(self.leaving.get((kind, stage), [])))
        return [self._tag(kind, stage, what, number) for number in numbers]
