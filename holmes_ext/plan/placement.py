"""Nodes of each pipeline stage, and the groups of ranks on them.

    rank         0 1 | 2 3 | 4 5 | 6 7    two ranks a node: ranks 2n and 2n + 1 run on node n
    node index    0     1     2     3     number of a node in the order of the ranks
    node_runs    (a, 2), (b, 2)           two nodes of type a, then two of type b
    stages       ((a, 4),), ((b, 4),)     with 2 stages: four ranks on type a, four ranks on type b

Nodes of one type are equal for the network (Network.node_types): in the same cluster, on the same
fabrics. The type is an index of Network.node_types.

The number of a rank among the ranks of its stage is its `rank_in_stage`. Ranks of all stages with the
same `rank_in_stage` form a pipeline.

Prices and simulations need not look at all ranks. A `Fold` keeps a representative of each set of
equal ranks, and counts the ranks that it represents:

    pipeline class   pipelines with equal nodes, groups and stage links
    node class       nodes of the same type that hold equally many ranks of each pipeline class, so
                     their NICs are equally busy
    family           equal communication groups of a stage

If a node holds ranks of several stages, these stages form a component: neighbouring stages that share
nodes. With nodes of 4 ranks and 2 ranks a stage, stages 0 and 1 are a component, stages 2 and 3 the next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby
from math import gcd, lcm
from typing import NamedTuple, TypeVar

from holmes_ext.plan.sizes import AXES, KINDS, Sizes, divisors, expert_grid

#: (node type, number of nodes or ranks)
Run = tuple[int, int]
#: Nodes of a stage as runs of equal nodes, in the order of the ranks.
Content = tuple[Run, ...]


def runs(node_types: Iterable[int]) -> Content:
    """Return neighbouring equal node types as (node type, count): 0 0 1 -> (0, 2), (1, 1)."""
    return tuple((node_type, len(list(equal))) for node_type, equal in groupby(node_types))


def merge_neighbours(parts: Iterable[Run]) -> Content:
    """Combine neighbouring runs of the same node type by adding up their counts.

    A run is (node type, number of nodes or ranks): (0, 2), (0, 1), (1, 1) -> (0, 3), (1, 1).
    """
    merged: list[Run] = []
    for node_type, count in parts:
        if merged and merged[-1][0] == node_type:
            count += merged.pop()[1]
        merged.append((node_type, count))
    return tuple(merged)


@dataclass(frozen=True)
class Placement:
    """Assignment of a job's ranks to nodes: the type of each node, in the order of the ranks.

    Each node holds ranks that follow each other. A node type stands for equal nodes: of the same cluster,
    on the same fabrics. Costs depend only on types, so placements with equal types cost the same.
    """

    sizes: Sizes  # parallel sizes, with the data size
    processes: int  # ranks of each node; if node types differ, the greatest common divisor of them
    node_runs: Content  # (node type, number of nodes that follow each other), in rank order
    #: Names of the nodes in the order of the ranks, if a user chose them. Otherwise the nodes of
    #: each type stand in the launcher's order.
    names: tuple[str, ...] = field(default=(), compare=False)
    #: Node type -> ranks of each node of this type. Empty: every node has `processes` ranks.
    widths: tuple[int, ...] = field(default=(), compare=False)

    @classmethod
    def of(
        cls, sizes: Sizes, processes: int, node_types: Iterable[int], widths: tuple[int, ...] = ()
    ) -> Placement:
        """Return the placement on nodes of these types, given in the order of the ranks.

        Args:
            sizes: Parallel sizes, with the data size.
            processes: Ranks of each node; their greatest common divisor if node types differ.
            node_types: Type of each node.
            widths: Node type -> ranks of each node of this type. Empty: `processes` for all.
        """
        node_runs = runs(node_types)  # types 0 0 1 -> (0, 2), (1, 1)
        return cls(sizes, processes, node_runs, widths=widths)

    @classmethod
    def of_parts(
        cls,
        sizes: Sizes,
        processes: int,
        parts: Sequence[Sequence[int]],
        widths: tuple[int, ...] = (),
    ) -> Placement:
        """Return the placement whose components have the given nodes.

        A component is a set of neighbouring stages that share nodes. Global ranks are numbered in
        rounds. In each round, every stage in turn gets `stride` ranks (the distance from a rank to its
        counterpart in the next stage). With stride 2 and 2 stages: stage 0 has ranks 0 1 4 5, stage 1
        has ranks 2 3 6 7; the first round is 0 1 2 3.

        Args:
            sizes: Parallel sizes, with the data size.
            processes: Ranks of each node; their greatest common divisor if node types differ.
            parts: For each component in stage order, the type of each of its nodes. All components
                have equally many ranks. In each round, the ranks of a component fill whole nodes.
            widths: Node type -> ranks of each node of this type. Empty: `processes` for all.
        """
        if len(parts) == 1:
            return cls.of(sizes, processes, parts[0], widths)
        stride = sizes.strides()["pp"]  # distance from a rank to its counterpart in the next stage
        # The order of the nodes: in the first round those of component 0, those of component 1, ...;
        # then the same for the second round.
        round_ranks = stride * sizes.pipeline // len(parts)  # ranks of a component in a round
        rounds_of_parts = [_rounds(part, round_ranks, processes, widths) for part in parts]
        node_types: list[int] = []
        for components_of_round in zip(*rounds_of_parts):
            for nodes_of_component in components_of_round:
                node_types += nodes_of_component
        return cls.of(sizes, processes, node_types, widths)

    def width(self, node_type: int) -> int:
        """Return how many ranks each node of the type `node_type` holds."""
        return self.widths[node_type] if self.widths else self.processes

    @cached_property
    def has_equal_nodes(self) -> bool:
        """Return whether every node has `processes` ranks."""
        return all(width == self.processes for width in self.widths)

    @cached_property
    def _first_ranks(self) -> list[int]:
        """Return the first rank of each node; the last item is the number of all ranks."""
        widths = (self.width(node_type) for node_type in self.node_types())
        return [0, *accumulate(widths)]

    def node_of(self, rank: int) -> int:
        """Return the index of the node that holds a global rank."""
        if self.has_equal_nodes:
            return rank // self.processes
        return bisect_right(self._first_ranks, rank) - 1

    @cached_property
    def nodes(self) -> int:
        """Return the number of nodes of the job."""
        return sum(count for _, count in self.node_runs)

    @cached_property
    def stage_ranks(self) -> int:
        """Return how many ranks each pipeline stage has."""
        ranks = sum(count * self.width(node_type) for node_type, count in self.node_runs)
        return ranks // self.sizes.pipeline

    @cached_property
    def stride(self) -> int:
        """Return the distance, in ranks, from a rank to its counterpart in the next stage."""
        return self.sizes.strides()["pp"]

    def node_types(self) -> list[int]:
        """Return the type of each node, in the order of the ranks."""
        return [node_type for node_type, count in self.node_runs for _ in range(count)]

    def rank(self, rank_in_stage: int, stage: int) -> int:
        """Return the global rank of the rank with number `rank_in_stage` among those of a stage."""
        # Global ranks come in rounds: `stride` ranks of stage 0, of stage 1, ... of the last stage.
        round_number, offset = divmod(rank_in_stage, self.stride)
        return (round_number * self.sizes.pipeline + stage) * self.stride + offset

    @cached_property
    def stages(self) -> tuple[Content, ...]:
        """Return for each stage the types of its nodes, as runs: (node type, number of ranks on such nodes).

        Global ranks come in rounds of pipeline x stride ranks. In a round, each stage has `stride`
        ranks that follow each other: with pipeline 2 and stride 2, stage 0 has the ranks 0 1, 4 5,
        and stage 1 has 2 3, 6 7.
        """
        round_ranks = self.stride * self.sizes.pipeline
        runs_of: list[list[Run]] = [[] for _ in range(self.sizes.pipeline)]  # by stage
        rank = 0
        for node_type, nodes in self.node_runs:
            end = rank + nodes * self.width(node_type)  # first rank after these equal nodes
            while rank < end:
                stage, offset = divmod(rank % round_ranks, self.stride)
                is_at_round_start = rank % round_ranks == 0
                # Rounds that lie on these equal nodes as a whole are added at once.
                whole_rounds = (end - rank) // round_ranks if is_at_round_start else 0
                if whole_rounds:
                    for stage_runs in runs_of:
                        stage_runs.append((node_type, whole_rounds * self.stride))
                    rank += whole_rounds * round_ranks
                else:  # the ranks that `stage` has in this round, as far as the nodes are equal
                    ranks = min(self.stride - offset, end - rank)
                    runs_of[stage].append((node_type, ranks))
                    rank += ranks

        # merge_neighbours: (a, 2), (a, 1) -> (a, 3). Equal stages share one object, which makes
        # comparisons fast.
        shared: dict[Content, Content] = {}
        contents = map(merge_neighbours, runs_of)
        return tuple(shared.setdefault(content, content) for content in contents)

    @cached_property
    def borders(self) -> list[int]:
        """Return the numbers of the ranks in a stage at which the node type of some stage changes.

        The list ascends, from 0 to `stage_ranks`, both included. Between two neighbours in the list,
        the nodes of every stage are equal.
        """
        ends: set[int] = set()
        for content in set(self.stages):  # each different (node type, ranks), ... of a stage
            rank_counts = [ranks for _, ranks in content]
            ends.update(accumulate(rank_counts))  # end of each node type's ranks in the stage
        return [0, *sorted(ends)]

    @cached_property
    def stages_per_component(self) -> int:
        """Return the number of stages in a component: neighbouring stages that share nodes.

        A node may hold ranks of several stages. Components are sets of equally many stages, such that
        each node belongs to a single component. So the nodes of a component can be moved or priced
        as a whole. The result is the smallest possible size of a component: 1 if no node holds ranks
        of two stages, and the number of all stages if no smaller size is possible.
        """
        if self.has_equal_nodes:
            # A stage begins at a multiple of `stride`. After `count` stages, this is also the first
            # rank of a node.
            count = self.processes // gcd(self.stride, self.processes)
            return count if self.sizes.pipeline % count == 0 else self.sizes.pipeline
        first_ranks = set(self._first_ranks)
        ranks = self._first_ranks[-1]
        for count in divisors(self.sizes.pipeline):
            # Global ranks come in rounds: `stride` ranks of each stage in turn. So `count` neighbouring
            # stages have count * stride ranks in a row. No node has ranks of two such rows if each row
            # begins at the first rank of a node.
            if first_ranks.issuperset(range(0, ranks, count * self.stride)):
                return count
        return self.sizes.pipeline

    @cached_property
    def aligned_ranks(self) -> int:
        """Return the least number of ranks that is a multiple of every node's number of ranks."""
        return lcm(*(self.width(node_type) for node_type, _ in self.node_runs))

    @cached_property
    def components(self) -> tuple[tuple[int, ...], ...]:
        """Return for each component the indices of its nodes, in the order of the ranks.

        A component is a set of neighbouring stages that share nodes. Components are in stage order.
        """
        node_indices_of: dict[int, list[int]] = {}
        for node_index, first_rank in enumerate(self._first_ranks[:-1]):
            # Stage of the node's first rank. Every `stride` ranks, the next stage begins.
            stage = first_rank // self.stride % self.sizes.pipeline
            node_indices_of.setdefault(stage // self.stages_per_component, []).append(node_index)
        return tuple(tuple(node_indices_of[index]) for index in sorted(node_indices_of))

    @cached_property
    def parts(self) -> tuple[Content, ...]:
        """Return the nodes of each component, in the order of the ranks, as runs of equal nodes.

        A component is a set of neighbouring stages that share nodes.

        Returns:
            For each component: (node type, number of nodes of this type that follow each other).
        """
        result: list[Content] = []
        if self.stages_per_component > 1:
            node_types = self.node_types()
            for node_indices in self.components:
                result.append(runs(node_types[index] for index in node_indices))
            return tuple(result)
        # Each stage has its own nodes. `stages` counts ranks, so divide by those of a node.
        for content in self.stages:
            result.append(
                tuple((node_type, ranks // self.width(node_type)) for node_type, ranks in content)
            )
        return tuple(result)

    def alone(self, *components: int) -> Placement:
        """Return a shorter pipeline, which consists of only some components of this placement.

        Args:
            components: Numbers of the components (sets of stages that share nodes), in stage order.
        """
        if len(components) == len(self.parts):
            return self
        sizes = replace(self.sizes, pipeline=len(components) * self.stages_per_component)
        node_types_of = []  # for each component, the type of each of its nodes
        for component in components:
            equal_nodes = self.parts[component]  # runs of equal nodes: (type, count)
            node_types_of.append([node_type for node_type, n in equal_nodes for _ in range(n)])
        return Placement.of_parts(sizes, self.processes, node_types_of, self.widths)


def _rounds(
    part: Sequence[int], round_ranks: int, processes: int, widths: tuple[int, ...]
) -> list[list[int]]:
    """Divide the nodes of a component (stages that share nodes) into the rounds of its rank numbers.

    Args:
        part: Type of each node of the component, in the order of the ranks.
        round_ranks: Ranks of the component in each round; they fill whole nodes.
        processes: Ranks of each node, if `widths` is empty.
        widths: Node type -> ranks of each node of this type.

    Returns:
        For each round, the types of its nodes.
    """
    rounds: list[list[int]] = []
    ranks = 0
    for node_type in part:
        if ranks % round_ranks == 0:
            rounds.append([])
        rounds[-1].append(node_type)
        ranks += widths[node_type] if widths else processes
    return rounds


@dataclass(frozen=True)
class GroupPart:
    """Equally busy nodes of a communication group, and the number of groups that use each of them.

    The nodes have the same type, and hold equally many ranks of each class of equal pipelines.
    """

    node_class: int  # number of the class that these nodes form in the placement
    node_type: int  # cluster and fabrics of the nodes: an index of Network.node_types
    nodes: int  # number of such nodes in a group
    ranks_per_node: int  # ranks of a group on each of these nodes
    groups: int  # groups of the family with ranks on each of these nodes
    concurrent_groups: int  # groups of all families and stages with ranks on each of these nodes


@dataclass(frozen=True)
class GroupFamily:
    """Equal communication groups of a stage, which therefore all have the same price.

    The groups lie on equal nodes, and their ranks belong to the same classes of equal pipelines.
    """

    stage: int
    ranks: int  # of each group
    count: int  # number of groups
    parts: tuple[GroupPart, ...]  # nodes of a single group, in sets of equal nodes
    pipeline_classes: tuple[int, ...]  # classes of pipelines that have ranks in the groups
    ring: Content  # types of the nodes that a ring through all ranks of a group visits

    @cached_property
    def node_types(self) -> frozenset[int]:
        """Return the types of the nodes of a group."""
        return frozenset(part.node_type for part in self.parts)

    @cached_property
    def nodes(self) -> int:
        """Return the number of nodes of a group."""
        return sum(part.nodes for part in self.parts)


@dataclass(frozen=True)
class StageMessages:
    """Numbers of messages from one stage to another, in all pipelines of a class.

    A pipeline is one rank of each stage. Pipelines on equal nodes form a class.
    """

    sender: int  # node class of the sending nodes
    receiver: int  # node class of the receiving nodes
    node_types: tuple[int, int]  # types of the sending and the receiving nodes
    leaving: int  # messages that leave a sending node at the same time
    reaching: int  # messages that reach a receiving node at the same time
    count: int  # messages of all pipelines of the class
    local: bool = False  # whether the messages stay inside a node

    @property
    def turned(self) -> StageMessages:
        """Return the counts of the messages that go in the opposite direction, such as gradients."""
        sender_type, receiver_type = self.node_types
        return StageMessages(
            sender=self.receiver,
            receiver=self.sender,
            node_types=(receiver_type, sender_type),
            leaving=self.reaching,
            reaching=self.leaving,
            count=self.count,
            local=self.local,
        )


def family_of(placement: Placement, ranks: Sequence[int]) -> GroupFamily:
    """Return a family with a single communication group, which consists of the given ranks.

    Prices are computed for families of equal groups (GroupFamily), so a group that no plan contains
    becomes a family, too. The remaining ranks of its nodes are assumed to be in similar groups that
    use the NICs at the same time.

    Args:
        placement: Nodes of the job.
        ranks: Global ranks of the group.
    """
    node_types = placement.node_types()  # type of each node, in the order of the ranks
    ranks_on = Counter(map(placement.node_of, ranks))  # node index -> ranks on it
    # (node type, ranks of the group on it) -> number of such nodes
    equal_nodes = Counter((node_types[index], count) for index, count in ranks_on.items())
    parts = []

    # Here, a class of nodes are those of the same type that hold equally many ranks of the group.
    for node_class, ((node_type, ranks_per_node), nodes) in enumerate(equal_nodes.items()):
        # Similar groups fill the node, and all of them use its NIC at the same time.
        groups = max(1, placement.width(node_type) // ranks_per_node)
        part = GroupPart(
            node_class=node_class,
            node_type=node_type,
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            groups=groups,
            concurrent_groups=groups,  # the same: there is no other family or stage
        )
        parts.append(part)
    return GroupFamily(
        stage=0,
        ranks=len(ranks),
        count=1,
        parts=tuple(parts),
        pipeline_classes=(),
        # Nodes that a ring visits, in the order of the ranks: (node type, number in a row).
        ring=merge_neighbours((node_types[index], 1) for index in ranks_on),
    )


Key = TypeVar("Key", bound=Hashable)


def _class_numbers(signatures: Mapping[Key, Hashable]) -> dict[Key, int]:
    """Return the number of each key's class, where keys with equal signatures form a class.

    {a: x, b: y, c: x} -> {a: 0, b: 1, c: 0}
    """
    distinct = dict.fromkeys(signatures.values())
    number_of = {signature: number for number, signature in enumerate(distinct)}
    return {key: number_of[signature] for key, signature in signatures.items()}


class _Copies(NamedTuple):
    """Factors that convert numbers of kept ranks and groups into numbers of all ranks and groups.

    A Fold keeps a representative of equal tensor-parallel ranks, so that there is less to price.
    """

    ranks: int  # ranks of the job that a kept rank represents, in the same group
    groups: int  # groups of the job that a group of kept ranks represents


class Fold:
    """Compact form of a placement: a representative of each set of equal ranks, with their number.

    Equal ranks put equal loads on equal nodes, so it is enough to price the representative (the kept
    rank). Two steps drop ranks:

        tensor ranks   Of `folded_tensor_ranks` tensor-parallel neighbours on a node, the first is kept.
                       `full_placement` has all ranks of the job, `placement` only the kept ones.
        pipelines      A pipeline is one rank of each stage, all with the same `rank_in_stage` (number of a
                       rank among those of its stage). On equal nodes, pipelines repeat with a period of
                       `_repeating_ranks`; those of the first period are kept.
    """

    def __init__(self, placement: Placement):
        """Select the ranks to keep, count the ranks that each represents, and number the classes.

        Pipelines on equal nodes form a pipeline class. Nodes of the same type form a node class if
        they hold equally many ranks of each pipeline class.

        Args:
            placement: The placement with all ranks of the job.
        """
        self.full_placement = placement
        #: Tensor-parallel neighbours on a node that a kept rank represents (itself included).
        self.folded_tensor_ranks = _count_folded_tensor_ranks(placement)
        sizes = placement.sizes
        if self.folded_tensor_ranks > 1:
            sizes = replace(sizes, tensor=sizes.tensor // self.folded_tensor_ranks)
        #: The placement without the dropped tensor-parallel ranks: each node has fewer ranks.
        self.placement = replace(
            placement,
            sizes=sizes,
            processes=placement.processes // self.folded_tensor_ranks,
            widths=tuple(width // self.folded_tensor_ranks for width in placement.widths),
        )
        self.stages = range(sizes.pipeline)
        #: Axis -> distance between neighbours along it, among the ranks of a stage.
        self._strides = _strides(self.placement)
        #: Period with which the ranks of a stage repeat on equal nodes.
        self._repeating_ranks = _count_repeating_ranks(self.placement, self._strides)
        #: Kept rank in stage -> number of equal ranks in the stage (itself included).
        self._multiplicity = dict(self._kept_ranks())
        #: Kept rank in stage -> by stage, the index of the node that holds the rank.
        self._node_indices = {
            rank_in_stage: tuple(
                self.placement.node_of(self.placement.rank(rank_in_stage, stage))
                for stage in self.stages
            )
            for rank_in_stage in self._multiplicity
        }

        # Node index after each run of equal nodes. bisect_right finds the run that has a node.
        ends = list(accumulate(count for _, count in placement.node_runs))
        #: Node index -> node type, for nodes with kept ranks.
        self._node_type_at = {
            node_index: placement.node_runs[bisect_right(ends, node_index)][0]
            for node_indices in self._node_indices.values()
            for node_index in node_indices
        }
        tensor_stride = self._strides["tp"]
        #: Kept rank in stage -> number of its data-parallel group: its tensor-parallel coordinate.
        self._data_group = {
            rank_in_stage: rank_in_stage // tensor_stride % sizes.tensor
            for rank_in_stage in self._multiplicity
        }
        self.pipeline_class_of = self._classes_of_pipelines()  # rank in stage -> pipeline class
        self.count: Counter[int] = Counter()  # pipeline class -> number of pipelines
        first_of: dict[int, int] = {}  # pipeline class -> its first rank in stage
        for rank_in_stage, pipeline_class in self.pipeline_class_of.items():
            equal_ranks = self._multiplicity[rank_in_stage]  # each of them has its own pipeline
            self.count[pipeline_class] += equal_ranks * self.folded_tensor_ranks
            first_of.setdefault(pipeline_class, rank_in_stage)
        #: By pipeline class: the node index of each stage, of the first pipeline of the class.
        self.pipeline_classes = [self._node_indices[first_of[each]] for each in sorted(first_of)]
        #: Node index -> (pipeline class, stage) -> ranks on the node.
        self._ranks_on: dict[int, Counter[tuple[int, int]]] = {}
        for rank_in_stage, node_indices in self._node_indices.items():
            pipeline_class = self.pipeline_class_of[rank_in_stage]
            for stage, node_index in enumerate(node_indices):
                self._ranks_on.setdefault(node_index, Counter())[pipeline_class, stage] += 1

        # Nodes form a class if they have the same type, and equally many ranks of each pipeline class.
        contents = {
            node_index: (self._node_type_at[node_index], frozenset(ranks.items()))
            for node_index, ranks in self._ranks_on.items()
        }

        # Node index -> node class. Nodes with equal contents get the same number.
        self.node_class_of = _class_numbers(contents)
        # Results that are computed once.
        self._families_of: dict[tuple[int, str], tuple[GroupFamily, ...]] = {}
        self._leaving_between: dict[tuple[int, int], Counter[tuple[int, int]]] = {}

    def _kept_ranks(self) -> Iterator[tuple[int, int]]:
        """Yield the ranks of a stage that this compact placement keeps, each with its number of equal ranks.

        On equal nodes, the ranks of a stage repeat with a period of `_repeating_ranks`. Only those
        of the first period are kept.

        Yields:
            (number of a rank among the ranks of its stage, number of equal ranks including itself).
        """
        borders = self.placement.borders  # ranks in stage where the type of the nodes changes
        for low, high in zip(borders, borders[1:]):  # ranks low..high - 1 are on equal nodes
            stop = high  # all ranks are kept, unless whole periods of them are equal
            equal_ranks = 1
            has_whole_periods = low % self._repeating_ranks == high % self._repeating_ranks == 0
            if has_whole_periods:
                stop = low + self._repeating_ranks
                equal_ranks = (high - low) // self._repeating_ranks
            for rank_in_stage in range(low, stop):
                yield rank_in_stage, equal_ranks

    def _classes_of_pipelines(self) -> dict[int, int]:
        """Return the pipeline class of every pipeline that the fold keeps.

        A pipeline is one rank of each stage, all with the same `rank_in_stage`. Two pipelines belong
        to the same class if they satisfy two conditions:

            nodes    Their nodes have equal types, stage by stage (equal signatures).
            groups   Their data-parallel groups contain equally many pipelines of each signature. A
                     group that also has pipelines in another cluster reduces more slowly, so its
                     pipelines are not equal to those of a group in a single cluster.

        Returns:
            Rank in stage of a pipeline -> number of its class.
        """
        # First condition: the signature of each pipeline, by its rank in stage.
        signatures = {
            rank_in_stage: self._signature(node_indices)
            for rank_in_stage, node_indices in self._node_indices.items()
        }

        # Second condition: the number of pipelines with each signature, by data-parallel group.
        counts_of: dict[int, Counter[Hashable]] = {}  # group -> signature -> number of pipelines
        for rank_in_stage, signature in signatures.items():
            counts = counts_of.setdefault(self._data_group[rank_in_stage], Counter())
            counts[signature] += self._multiplicity[rank_in_stage]  # dropped pipelines included
        content_of = {group: frozenset(counts.items()) for group, counts in counts_of.items()}

        # Pipelines that agree in both values get the same number.
        both_values = {
            rank_in_stage: (signature, content_of[self._data_group[rank_in_stage]])
            for rank_in_stage, signature in signatures.items()
        }
        return _class_numbers(both_values)

    def _signature(self, node_indices: tuple[int, ...]) -> Hashable:
        """Return a value that is equal for pipelines on equal nodes.

        The value has the type of each stage's node, and whether the next stage is on the same node.

        Args:
            node_indices: Index of the node of each stage of a pipeline.
        """
        following = (*node_indices[1:], node_indices[0])
        node_types = tuple(self._node_type_at[index] for index in node_indices)
        stays_on_node = tuple(index == other for index, other in zip(node_indices, following))
        return node_types, stays_on_node

    def pipeline_class_at(self, rank_in_stage: int) -> int:
        """Return the class of the pipeline that consists of rank `rank_in_stage` of each stage.

        Pipelines on equal nodes form a class.

        Args:
            rank_in_stage: Number of any rank of a stage of the full placement. The fold need not
                have kept this rank.
        """
        # A kept rank represents `folded_tensor_ranks` neighbours. Its number counts kept ranks only.
        folded_rank = rank_in_stage // self.folded_tensor_ranks
        # Ranks on equal nodes repeat with the period `_repeating_ranks`, and only the first period
        # is kept. There, the rank at the same position represents this rank.
        if folded_rank not in self.pipeline_class_of:
            run_start = max(border for border in self.placement.borders if border <= folded_rank)
            folded_rank = run_start + (folded_rank - run_start) % self._repeating_ranks
        return self.pipeline_class_of[folded_rank]

    def node_type_on(self, pipeline_class: int, stage: int) -> int:
        """Return the type of the nodes that hold a stage in the pipelines of a class.

        All pipelines of a class have nodes of the same types.
        """
        return self._node_type_at[self.pipeline_classes[pipeline_class][stage]]

    def ranks(self, pipeline_class: int, stage: int) -> tuple[int, ...]:
        """Return all global ranks of a stage that belong to the pipelines of a class.

        Pipelines on equal nodes form a class. A fold keeps one of several equal ranks; the result has
        all of them.
        """
        ranks: list[int] = []
        for first_rank, other_class in self.pipeline_class_of.items():
            if other_class != pipeline_class:
                continue
            # The equal ranks follow the kept rank at distances of `_repeating_ranks`.
            stop = first_rank + self._multiplicity[first_rank] * self._repeating_ranks
            for rank_in_stage in range(first_rank, stop, self._repeating_ranks):
                # `placement` numbers only kept ranks; each stands for `folded_tensor_ranks` ranks.
                first = self.placement.rank(rank_in_stage, stage) * self.folded_tensor_ranks
                ranks += range(first, first + self.folded_tensor_ranks)
        return tuple(sorted(ranks))

    def stage_link(self, pipeline_class: int, stage: int, other: int) -> StageMessages:
        """Return the messages from `stage` to `other` while a single class of pipelines sends.

        Pipelines on equal nodes form a class.
        """
        return self._stage_link(pipeline_class, stage, other, concurrent={pipeline_class})

    def stage_links(
        self, stage: int, other: int, fabric: Callable[[Sequence[int]], Hashable]
    ) -> list[StageMessages]:
        """Return the messages from `stage` to `other`, with an entry for each pipeline class.

        A pipeline is one rank of each stage. Pipelines on equal nodes form a pipeline class.

        Args:
            stage: Number of the sending stage.
            other: Number of the receiving stage.
            fabric: Returns the fabric between two node types. All pipeline classes whose messages use
                the same fabric send at the same time, so their messages are counted together.
        """
        pipeline_classes = range(len(self.pipeline_classes))
        fabric_of = {
            pipeline_class: fabric(
                (self.node_type_on(pipeline_class, stage), self.node_type_on(pipeline_class, other))
            )
            for pipeline_class in pipeline_classes
        }
        classes_on: dict[Hashable, set[int]] = {}  # fabric -> pipeline classes that send over it
        for pipeline_class, name in fabric_of.items():
            classes_on.setdefault(name, set()).add(pipeline_class)
        return [
            self._stage_link(pipeline_class, stage, other, classes_on[fabric_of[pipeline_class]])
            for pipeline_class in pipeline_classes
        ]

    def _stage_link(
        self, pipeline_class: int, stage: int, other: int, concurrent: Collection[int]
    ) -> StageMessages:
        """Return the numbers of messages from one stage to another in the pipelines of a class.

        Pipelines on equal nodes form a class, and each pipeline sends a message. The result has:

            count       messages of this class
            leaving     messages that leave a sending node, of all classes in `concurrent`
            reaching    messages that reach a receiving node, of all classes in `concurrent`

        Args:
            pipeline_class: Number of the class.
            stage: Number of the sending stage.
            other: Number of the receiving stage.
            concurrent: Pipeline classes that send at the same time, `pipeline_class` included.
        """
        # Node of each stage, in the first pipeline of the class. Its other pipelines have equal nodes.
        node_indices = self.pipeline_classes[pipeline_class]
        source = node_indices[stage]
        target = node_indices[other]

        # A message reaches the target from each pipeline that has its rank of `other` on that node,
        # and its rank of `stage` elsewhere. The same pipelines would send from `other` to `stage`.
        leaving = self._count_leaving(source, stage, other, concurrent)
        reaching = self._count_leaving(target, other, stage, concurrent)
        return StageMessages(
            sender=self.node_class_of[source],
            receiver=self.node_class_of[target],
            node_types=(self._node_type_at[source], self._node_type_at[target]),
            leaving=max(1, leaving),  # 0 if both stages are on the same node (`local`)
            reaching=max(1, reaching),
            count=self.count[pipeline_class],
            local=source == target,
        )

    def _count_leaving(
        self, node_index: int, stage: int, other: int, pipeline_classes: Collection[int]
    ) -> int:
        """Return how many messages from `stage` to `other` leave a node, in the given pipeline classes.

        A fold keeps one of several equal ranks. The messages of the ranks that are not kept count, too.

        Args:
            node_index: Index of the node.
            stage: Sending stage.
            other: Receiving stage.
            pipeline_classes: Numbers of classes; a class are pipelines on equal nodes.
        """
        leaving = self._messages_leaving(stage, other)  # of kept ranks
        kept = sum(leaving[node_index, pipeline_class] for pipeline_class in pipeline_classes)
        # A kept rank represents `folded_tensor_ranks` ranks of the node, which all send.
        return kept * self.folded_tensor_ranks

    def _messages_leaving(self, stage: int, other: int) -> Counter[tuple[int, int]]:
        """Return how many messages from `stage` to `other` leave each node, by pipeline class.

        A fold keeps one of several equal pipelines, and only these count. Each sends a single message,
        which leaves the node if `other` is on another node.

        Returns:
            (index of the sending node, pipeline class) -> number of messages.
        """
        key = (stage, other)
        if key not in self._leaving_between:
            # node_indices: index of the node of each stage of a pipeline, by its rank in stage
            self._leaving_between[key] = Counter(
                (node_indices[stage], self.pipeline_class_of[rank_in_stage])
                for rank_in_stage, node_indices in self._node_indices.items()
                if node_indices[stage] != node_indices[other]
            )
        return self._leaving_between[key]

    @cached_property
    def _data_groups_on(self) -> dict[int, int]:
        """Return for each node class the number of data-parallel groups with ranks on a node.

        A node class are nodes of the same type that hold equally many ranks of each class of equal
        pipelines, so they have the same number of groups. Groups of all stages count. A fold keeps one
        of several equal ranks; groups of the ranks that are not kept count, too.

        Returns:
            Node class -> number of groups.
        """
        # Index of a node -> groups with a kept rank on it. Each stage has its own groups, so a group
        # is identified by (stage, its number in the stage).
        groups_on: dict[int, set[tuple[int, int]]] = {}
        for rank_in_stage, node_of_stage in self._node_indices.items():
            group = self._data_group[rank_in_stage]
            for stage, node_index in enumerate(node_of_stage):
                groups_on.setdefault(node_index, set()).add((stage, group))
        count_of_class = {}
        for node_index, groups in groups_on.items():
            # A kept rank represents `folded_tensor_ranks` tensor-parallel neighbours on the node.
            # Each of these neighbours belongs to another data-parallel group.
            count = len(groups) * self.folded_tensor_ranks
            count_of_class[self.node_class_of[node_index]] = count
        return count_of_class

    def families(self, stage: int, role: str = "data") -> tuple[GroupFamily, ...]:
        """Return the communication groups of a stage, as families of equal groups.

        Groups are equal if they lie on equal nodes and belong to equal pipelines. A family counts
        its groups.

        Args:
            stage: Number of the stage.
            role: Kind of the groups: "data" (sum gradients), "tensor", "context" or "expert". Groups
                of a single rank send nothing, and are left out unless the role is "data".
        """
        if (stage, role) not in self._families_of:
            self._families_of[stage, role] = tuple(self._families(stage, role))
        return self._families_of[stage, role]

    def _families(self, stage: int, role: str) -> Iterator[GroupFamily]:
        """Yield the communication groups of a stage, with equal groups combined into a family.

        A pipeline is one rank of each stage; equal pipelines form a pipeline class. Equally busy
        nodes of the same type form a node class. Two groups are equal under two conditions: they
        have equally many ranks on nodes of each node class, and the pipelines of their ranks belong
        to the same pipeline classes.

        Args:
            stage: Number of the stage.
            role: Kind of the groups: "data", "tensor", "context" or "expert".
        """
        # Group -> its ranks that the fold keeps, each as its number among the ranks of the stage
        # (rank in stage).
        members_of = self._groups(role)
        # Rank in stage -> index of the node that holds it.
        node_index_of = {
            rank_in_stage: node_indices[stage]
            for rank_in_stage, node_indices in self._node_indices.items()
        }
        groups_on: dict[int, set[Hashable]] = {}  # node index -> groups with a rank on it
        for group, members in members_of.items():
            for rank_in_stage in members:
                groups_on.setdefault(node_index_of[rank_in_stage], set()).add(group)
        equal_groups: dict[Hashable, list[Hashable]] = {}  # signature -> groups that have it
        for group, members in members_of.items():
            ranks_on = Counter(node_index_of[rank_in_stage] for rank_in_stage in members)
            # (node class, ranks of the group on a node) -> number of such nodes
            nodes = Counter((self.node_class_of[index], ranks) for index, ranks in ranks_on.items())
            pipeline_classes = frozenset(self.pipeline_class_of[member] for member in members)
            signature = (frozenset(nodes.items()), pipeline_classes)
            equal_groups.setdefault(signature, []).append(group)
        for groups in equal_groups.values():
            yield self._family(stage, role, groups, members_of, node_index_of, groups_on)

    def _family(
        self,
        stage: int,
        role: str,
        groups: Sequence[Hashable],
        members_of: Mapping[Hashable, Sequence[int]],
        node_index_of: Mapping[int, int],
        groups_on: Mapping[int, Collection[Hashable]],
    ) -> GroupFamily:
        """Return equal communication groups as a GroupFamily, made from the first of them.

        A fold keeps only some of several equal ranks and groups. The counts in the result are those
        of the whole job. A rank is given as its number among the ranks of its stage, a node as its
        index.

        Args:
            stage: Number of the stage.
            role: Purpose of the groups: "data", "tensor", "context" or "expert".
            groups: Keys of the equal groups.
            members_of: Key of a group -> its ranks.
            node_index_of: Rank -> node that holds it.
            groups_on: Node -> keys of all groups of this role with ranks on it.
        """
        is_data = role == "data"
        copies = self._copies(role)  # ranks and groups of the job for each that the fold keeps
        members = members_of[groups[0]]
        member_nodes = [node_index_of[member] for member in members]

        # Ranks of a stage repeat periodically, and the fold keeps the first period. _multiplicity is
        # the number of periods. equal_nodes: index of a node -> number of equal nodes in the group.
        if is_data:
            # The group passes through all periods: the fold has all groups, but not all their nodes.
            equal_nodes = {node_index_of[member]: self._multiplicity[member] for member in members}
            count = len(groups)
        else:
            # The group lies within a period: the fold has all its nodes, but not all groups.
            equal_nodes = dict.fromkeys(member_nodes, 1)
            count = sum(self._multiplicity[members_of[group][0]] for group in groups)

        # Nodes that play the same part in the group are counted together.
        nodes_of: Counter[GroupPart] = Counter()
        for node_index, ranks in Counter(member_nodes).items():  # ranks of the group on the node
            # Groups of this family, and of all families, that use the NIC of the node.
            family_groups = copies.groups * sum(group in groups_on[node_index] for group in groups)
            if is_data:
                concurrent_groups = self._data_groups_on[self.node_class_of[node_index]]
            else:
                stages_on_node = {stage for _, stage in self._ranks_on[node_index]}
                concurrent_groups = copies.groups * len(groups_on[node_index]) * len(stages_on_node)
            part = GroupPart(
                node_class=self.node_class_of[node_index],
                node_type=self._node_type_at[node_index],
                nodes=0,  # counted in nodes_of
                ranks_per_node=copies.ranks * ranks,
                groups=family_groups,
                concurrent_groups=concurrent_groups,
            )
            nodes_of[part] += equal_nodes[node_index]
        parts = tuple(replace(part, nodes=nodes) for part, nodes in nodes_of.items())
        return GroupFamily(
            stage=stage,
            ranks=sum(part.nodes * part.ranks_per_node for part in parts),
            count=copies.groups * count,
            parts=parts,
            pipeline_classes=tuple(sorted({self.pipeline_class_of[member] for member in members})),
            ring=self._ring(member_nodes, equal_nodes),
        )

    def _copies(self, role: str) -> _Copies:
        """Return how many ranks and groups of the job stand behind each kept rank and each kept group.

        A kept rank represents n = `folded_tensor_ranks` tensor-parallel neighbours on a node. They are n
        ranks of the same tensor-parallel group. For any other role, these n ranks belong to n
        different groups, so a kept group represents n groups.

        Args:
            role: Kind of the groups: "data", "tensor", "context" or "expert".
        """
        if role == "tensor":
            return _Copies(ranks=self.folded_tensor_ranks, groups=1)
        return _Copies(ranks=1, groups=self.folded_tensor_ranks)

    def _ring(self, node_indices: Sequence[int], equal_nodes: Mapping[int, int]) -> Content:
        """Return the nodes that a ring of ranks visits, as (node type, number of nodes in a row).

        Args:
            node_indices: Index of the node of each rank, in the order of the ring.
            equal_nodes: Index of a node -> number of equal nodes that it represents.
        """
        visited = [index for index, _ in groupby(node_indices)]  # neighbours on a node count once
        return merge_neighbours(
            (self._node_type_at[index], equal_nodes[index]) for index in visited
        )

    def _groups(self, role: str) -> dict[Hashable, list[int]]:
        """Return the groups of a role within any stage, with the ranks that the fold keeps.

        A fold keeps one of several equal ranks. The ranks of a stage form a grid. Members of a group
        differ only along the axes of its role, KINDS[role], such as "dp" and "cp" for "data". Their
        coordinates along all other axes are the same, and serve as the key of the group.

        Args:
            role: Kind of the groups: "data", "tensor", "context" or "expert".

        Returns:
            Key of a group -> its ranks in order, each as its number among the ranks of the stage.
        """
        sizes = self.placement.sizes
        if role == "expert":
            # Axis -> number of ranks along it, and distance of neighbours, in layers with experts.
            grid, strides = expert_grid(sizes)
            axes = [(strides[axis], grid[axis]) for axis in ("tp", "dp")]  # all but "ep"
        else:
            axes = [
                (self._strides[axis], sizes.size(axis))
                for axis in AXES
                if axis != "pp" and axis not in KINDS[role]
            ]
        members_of: dict[Hashable, list[int]] = {}
        for rank_in_stage in self._multiplicity:
            coordinates = tuple(rank_in_stage // stride % size for stride, size in axes)
            members_of.setdefault(coordinates, []).append(rank_in_stage)

        # A group of a single rank sends nothing, so it is left out, with two exceptions. A kept rank
        # may represent several ranks of a tensor-parallel group. And every stage needs a family of
        # data-parallel groups, because its reduction is priced by them.
        keep_single = role == "data" or (role == "tensor" and self.folded_tensor_ranks > 1)
        if keep_single:
            return members_of
        return {group: members for group, members in members_of.items() if len(members) > 1}


def _count_folded_tensor_ranks(placement: Placement) -> int:
    """Return how many tensor-parallel ranks in a row cost the same, so that one can represent them.

    A Fold, the compact form of a placement, keeps only the first rank of each such row. The ranks
    of a row must be of the same tensor-parallel group and on the same node. So the length of a row
    divides the ranks of a group and the ranks of a node: it is their greatest common divisor.

    The result is 1 (keep all ranks) in two cases: if tensor-parallel ranks have no consecutive
    numbers, or if the ranks of a tensor-parallel group are in different expert-parallel groups at
    different places, so that they do not cost the same.
    """
    sizes = placement.sizes
    has_consecutive_ranks = sizes.axes[0] == "tp"  # the innermost axis
    is_whole_in_expert_grid = True
    if sizes.expert > 1:
        # The grid of the ranks in layers with experts. Its tensor-parallel size is 1 if expert groups
        # must be made of the ranks of a tensor-parallel group.
        sizes_of_expert_grid, _ = expert_grid(sizes)
        is_whole_in_expert_grid = sizes_of_expert_grid["tp"] == sizes.tensor
    if not has_consecutive_ranks or not is_whole_in_expert_grid:
        return 1
    return gcd(sizes.tensor, placement.processes)


def _strides(placement: Placement) -> dict[str, int]:
    """Return the distance between neighbours along each parallel axis, counted in ranks of a stage."""
    sizes = placement.sizes
    strides = sizes.strides()  # axis -> distance of neighbours among all ranks of the job
    del strides["pp"]
    outside_pipeline = sizes.axes[sizes.axes.index("pp") :]
    return {
        axis: stride // sizes.pipeline if axis in outside_pipeline else stride
        for axis, stride in strides.items()
    }


def _count_repeating_ranks(placement: Placement, strides: Mapping[str, int]) -> int:
    """Return the period, in ranks of a stage, after which the pattern of nodes and groups repeats.

    Example: nodes of 8 ranks, tensor-parallel groups of 4, and stages of whole nodes. Every 8 ranks of
    the stage are then a node with two tensor-parallel groups, so the period is 8.

    A period contains whole nodes, and whole tensor, context and expert groups. So the result is a
    common multiple of their lengths, built up step by step. It is all ranks of the stage if no
    period exists, or if the period does not divide the stage.

    Args:
        placement: The placement.
        strides: Axis -> distance between neighbours along it, among the ranks of a stage.
    """
    sizes = placement.sizes
    node_ranks = placement.aligned_ranks  # the ranks of each node, if all have equally many
    stage_ranks = placement.stage_ranks

    # Period so far, in ranks of the stage: if data is the outermost axis, whole tensor and context
    # groups lie in it. (strides: distances among the ranks of a stage.)
    length = strides["dp"]
    is_data_outermost = length * sizes.data == stage_ranks
    if not is_data_outermost:
        return stage_ranks  # tensor or context groups pass through the whole stage
    if sizes.expert > 1:
        # Layers with experts arrange the ranks of a stage in another grid: axes "tp", "ep" and "dp".
        grid, expert_strides = expert_grid(sizes)
        # These ranks contain whole expert groups, if "dp" is the outermost axis of that grid, too.
        expert_length = expert_strides["dp"]
        if expert_length * grid["dp"] != stage_ranks:
            return stage_ranks  # expert groups pass through the whole stage
        length = lcm(length, expert_length)

    # Global ranks number all stages in rounds: in each round, `stride` ranks of every stage in turn.
    # (`strides` has other numbers: distances among the ranks of a single stage.)
    stride = placement.stride
    if stride % node_ranks == 0:  # each stage has whole nodes
        length = lcm(length, node_ranks)
    elif stride < stage_ranks:
        # Stages may begin in the middle of a node. After the least number of rounds that fills whole
        # nodes, the ranks lie on their nodes as in the first round.
        round_ranks = stride * sizes.pipeline
        rounds = lcm(round_ranks, node_ranks) // round_ranks
        length = lcm(length, stride * rounds)
    else:  # all ranks of the stage follow each other, and do not fill whole nodes
        return stage_ranks
    return length if stage_ranks % length == 0 else stage_ranks
