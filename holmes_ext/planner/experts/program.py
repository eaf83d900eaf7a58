"""Search for the placement of experts on ranks with the least traffic, with a bound on the optimum.

A place is a set of ranks without a network between them, such as a node (places.py). Each rank has
slots for as many experts. The load of an expert is its number of tokens.

If the tokens are counted by rank and expert, an integer program finds the placement (arXiv
2508.09229; its servers are the places here). x[e, p] is 1 if expert e lives at place p, and far[r, p]
is the cost of a token from rank r to place p:

    minimize      sum_e sum_p x[e, p] sum_r counts[r, e] far[r, p]      cost of all tokens
    subject to    sum_p x[e, p] = 1                                     each expert has a place
                  sum_e x[e, p] = slots of p                            each slot has an expert
                  sum_e x[e, p] load[e] <= limit of p                   no place is overloaded

With several clusters the same program first assigns experts to clusters, then to the places of each
cluster. HiGHS (scipy.optimize.milp) solves it and bounds the optimum.

Counts by pairs of experts (tokens that two experts share, for dispatchers that send a token once to
each place) make the program quadratic. Then experts are swapped as long as that helps; the bound
assumes that each expert has its most frequent companions in the other slots of its place, or of its
cluster.

EPLB is DeepSeek's heuristic without its copies of experts, because training cannot have copies: the
fullest expert goes first, to the emptiest rank with room, whatever the costs. Its placement always
meets the limits, so the result never costs more than EPLB's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from holmes_ext.errors import HolmesError
from holmes_ext.plan.experts import RANK, Counts
from holmes_ext.plan.plan import Plan, load_plan
from holmes_ext.planner.experts.places import INSIDE, Places, places_of

#: Relative gap at which HiGHS may stop.
GAP = 0.002
#: Tolerances: of loads against limits, and for gains that are rounding errors.
LOAD_TOLERANCE = 1e-6
ROUNDING = 1e-9
#: Names of placements: experts in their order, EPLB's, and the result of this module.
IDENTITY, EPLB, PLACED = "identity", "EPLB", "placed"


@dataclass(frozen=True)
class Placed:
    """A placement of the experts, and its traffic."""

    #: IDENTITY, EPLB or PLACED.
    name: str
    #: Expert of each slot, rank by rank.
    order: tuple[int, ...]
    #: Cost of all tokens.
    cost: float
    #: Shares of the tokens that cross clusters, and nodes.
    crossing: float
    moving: float
    #: Load of the fullest rank, relative to the mean.
    fullest: float


@dataclass(frozen=True)
class Answer:
    """Placements of a layer's experts, and a lower bound on the cost of any placement."""

    #: IDENTITY, EPLB, PLACED.
    placements: tuple[Placed, ...]
    #: Lower bound on the cost of every placement within the limits.
    bound: float

    @property
    def best(self) -> Placed:
        """The cheapest placement that the search found within the limits of load (name PLACED)."""
        return self.placements[-1]

    @property
    def gap(self) -> float:
        """Largest fraction of the cost that another placement of the experts could save."""
        return max(0.0, 1 - self.bound / self.best.cost) if self.best.cost > 0 else 0.0


class _Solution(NamedTuple):
    """Assignment of experts to places (nodes) by an integer program, and a bound on its cost."""

    #: [experts] number of the place; None if no solution was found in time.
    places: Any
    bound: float  # on the cost of every assignment


def solve(
    counts: Counts, places: Places, balance: float = 1.1, seconds: float = 10.0, per_rank: int = 0
) -> Answer:
    """Find the placement of a layer's experts on ranks with the least traffic.

    The traffic is the sum of all tokens' costs. Each expert parallel rank gets equally many
    experts.

    Args:
        counts: Tokens: a row for each rank, or for each expert (tokens sent to both experts).
        places: Ranks by node (a place is the ranks of a node), and the cost of a token between
            ranks.
        balance: Most tokens of a node's experts, relative to the mean.
        seconds: Time limit of the solver (HiGHS).
        per_rank: Most experts that fit a rank's memory; 0 for no limit.

    Returns:
        The placement, two others to compare it with, and a lower bound on every placement's cost.

    Raises:
        HolmesError: The experts do not fit the ranks, `balance` is below 1, or scipy is missing.
    """
    ranks = places.ranks  # of an expert parallel group
    experts = counts.experts
    if per_rank and experts > per_rank * ranks:
        raise HolmesError(f"{experts} experts do not fit on {ranks} ranks of {per_rank} each")
    if experts % ranks:
        raise HolmesError(
            f"{experts} experts cannot be split evenly over {ranks} expert-parallel ranks"
        )
    if not balance >= 1:
        raise HolmesError(f"balance is {balance:g}; it must be 1 or more")
    return _Problem(counts, places, balance).answer(seconds)


def place_experts(
    counts: Sequence[Sequence[float]], plan: Plan | str, rows: str = RANK, balance: float = 1.1
) -> Placed:
    """Return the placement of the experts with the least traffic.

    Its `order[s]` is the expert of slot s; slots are numbered rank by rank within a group.

    Args:
        counts: Tokens, with a row for each rank and a column for each expert.
        plan: A Plan with an expert parallel size, or the path of its plan.json.
        rows: "rank"; or "expert" if `counts` has a row for each expert too, with the number of
            tokens that are sent to both experts.
        balance: Limit on the tokens of a cluster's experts, relative to the cluster's share. If
            EPLB (DeepSeek's heuristic) gives some cluster more, that is the limit.

    Raises:
        HolmesError: The counts do not fit the plan, or scipy is missing.
    """
    loaded = load_plan(plan) if isinstance(plan, str) else plan
    table = tuple(tuple(map(float, row)) for row in counts)
    return solve(Counts(rows, table), places_of(loaded), balance).best


def _libraries() -> tuple[ModuleType, ModuleType, ModuleType]:
    """Return numpy, scipy.optimize and scipy.sparse; raise HolmesError if they are not installed."""
    try:
        import numpy
        from scipy import optimize, sparse
    except ModuleNotFoundError as error:
        raise HolmesError(
            f"placing experts needs {error.name}: pip install 'holmes_ext[experts]'"
        ) from None
    return numpy, optimize, sparse


class _Problem:
    """Placement problem of a mixture-of-experts layer: which experts go to which ranks.

    A place is the expert parallel ranks of a node. A region is the list of places (numbers of
    nodes) of a cluster. A slot holds an expert. Dictionaries "rank -> experts" are whole
    placements; arrays [experts] hold the number of each expert's place.
    """

    def __init__(self, counts: Counts, places: Places, balance: float):
        """Compute each expert's tokens (load), and how many tokens nodes and clusters may get.

        A limit is `balance` times the mean load of as many experts, or the load that EPLB puts there
        if that is more. A place is a node's ranks; a region is the places of a cluster.
        """
        self.np, self.optimize, self.sparse = _libraries()
        np = self.np
        self.places = places
        #: Slots (experts) of each rank.
        self.slots = counts.experts // places.ranks
        self.by_rank = counts.rows == RANK
        #: Tokens [ranks, experts] (folded: summed over the expert parallel groups), or [experts,
        #: experts] without the diagonal.
        self.table = np.array(counts.folded(places.ranks) if self.by_rank else counts.table, float)
        if not self.by_rank:
            self.table = (self.table + self.table.T) / 2
            np.fill_diagonal(self.table, 0)
        #: Tokens of each expert.
        self.load = self.table.sum(0)
        #: Cost of a token [from rank, to rank].
        self.rank_cost = np.array(places.far)
        #: Slots of each place.
        self.room = np.array([len(ranks) * self.slots for ranks in places.of])
        self.first_ranks = [ranks[0] for ranks in places.of]
        self.place_of_rank = {
            rank: place for place, ranks in enumerate(places.of) for rank in ranks
        }
        # EPLB's placement, by load only: it always keeps the limits.
        self.eplb = self.packed(range(counts.experts), range(places.ranks))
        #: Cost of a token [from place, to place]. The ranks of a place have equal costs, so the
        #: first represents all.
        self.place_cost = self.rank_cost[self.first_ranks][:, self.first_ranks]
        self.regions = self._regions()
        self.balance = balance
        single_places = [[place] for place in range(len(self.room))]
        #: Most load of each place, and of each region, as arrays.
        self.limit = self.limits(single_places)
        self.limits_of_regions = self.limits(self.regions) if self.regions else self.limit
        #: (places of a region, most load of the region): limits of every placement. Without regions
        #: each place is limited.
        self.limited = list(zip(self.regions or single_places, self.limits_of_regions))

    def _regions(self) -> list[list[int]]:
        """Group the places (nodes) by cluster; [] if clusters overlap, or each has a single place."""
        # For each place, the places that a token reaches without crossing clusters (cost up to INSIDE).
        neighbours = [tuple(self.np.flatnonzero(row <= INSIDE)) for row in self.place_cost]
        regions = list(dict.fromkeys(neighbours))
        places = len(self.place_cost)
        is_partition = sum(map(len, regions)) == places
        if not is_partition or not 1 < len(regions) < places:
            return []
        return [list(region) for region in regions]

    def limits(self, regions: list[list[int]]) -> Any:
        """Return the most tokens that the experts in each region (list of nodes) may receive.

        It is `balance` times the mean of as many experts, or EPLB's (DeepSeek's heuristic) if more.
        """
        np = self.np
        eplb = self.place_of(self.eplb)  # place of each expert
        slots = np.array([self.room[region].sum() for region in regions])
        loads = np.array([self.load[np.isin(eplb, region)].sum() for region in regions])
        load_per_slot = max([self.balance * self.load.mean(), *(loads / slots)])
        return slots * load_per_slot

    # ------------------------------------------------------------------- placements and their cost

    def packed(self, experts: Sequence[int], ranks: Sequence[int]) -> dict[int, list[int]]:
        """Distribute experts over ranks by EPLB: most tokens first, each to the emptiest rank."""
        experts_of: dict[int, list[int]] = {rank: [] for rank in ranks}
        loads = dict.fromkeys(ranks, 0.0)
        for expert in sorted(experts, key=lambda expert: (-self.load[expert], expert)):
            with_free_slot = (rank for rank in ranks if len(experts_of[rank]) < self.slots)
            least_loaded = min(with_free_slot, key=lambda rank: (loads[rank], rank))
            experts_of[least_loaded].append(expert)
            loads[least_loaded] += self.load[expert]
        return experts_of

    def place_of(self, experts_of: dict[int, list[int]]) -> Any:
        """Convert rank -> experts into an array: the number of each expert's node."""
        result = self.np.zeros(len(self.load), int)
        for rank, experts in experts_of.items():
            result[experts] = self.place_of_rank[rank]
        return result

    def by_ranks(self, place_of: Any) -> dict[int, list[int]]:
        """Distribute the experts of each node over its ranks by EPLB; return rank -> experts."""
        result: dict[int, list[int]] = {}
        for place, ranks in enumerate(self.places.of):
            result |= self.packed(list(self.np.flatnonzero(place_of == place)), ranks)
        return result

    def total(self, experts_of: dict[int, list[int]], weights: Any) -> float:
        """Return the sum of weights[from rank, to rank] of all tokens, for experts placed on ranks."""
        rank_of = self.np.zeros(len(self.load), int)
        for rank, experts in experts_of.items():
            rank_of[experts] = rank
        if self.by_rank:
            return float((self.table * weights[:, rank_of]).sum())
        return float((self.table * weights[rank_of][:, rank_of]).sum() / 2)

    def placed(self, name: str, experts_of: dict[int, list[int]]) -> Placed:
        """Return a placement of the experts with its cost, and its shares of traffic.

        `crossing` and `moving` are the shares of tokens that cross clusters, and that leave their
        node. `fullest` is the load of the rank with most tokens, relative to the mean.

        Args:
            name: IDENTITY, EPLB or PLACED.
            experts_of: Rank -> experts.
        """
        # A table by pairs of experts has each token twice: in the rows of both of its experts.
        entries_per_token = 1 if self.by_rank else 2
        tokens = float(self.table.sum()) / entries_per_token or 1.0
        # For total(), [from rank, to rank]: part of these tokens that cross clusters, or leave a node.
        crosses, moves = map(self.np.array, (self.places.crossing, self.places.moving))
        ranks = sorted(experts_of)
        loads = [self.load[experts_of[rank]].sum() for rank in ranks]  # tokens of each rank
        mean_load = self.load.sum() / len(loads) or 1.0
        return Placed(
            name=name,
            order=tuple(int(expert) for rank in ranks for expert in experts_of[rank]),
            cost=self.total(experts_of, self.rank_cost),
            crossing=self.total(experts_of, crosses) / tokens,
            moving=self.total(experts_of, moves) / tokens,
            fullest=float(max(loads) / mean_load),
        )

    # ------------------------------------------------------------------- solution

    def answer(self, seconds: float) -> Answer:
        """Return the best placement of the experts found in `seconds`, and a bound on every cost.

        Two simple placements come with it: the experts in their order (IDENTITY), and EPLB's.
        """
        ranks = range(self.places.ranks)
        identity = {rank: list(range(rank * self.slots, (rank + 1) * self.slots)) for rank in ranks}
        baselines = [self.placed(IDENTITY, identity), self.placed(EPLB, self.eplb)]
        eplb_places = self.place_of(self.eplb)
        # Candidates: the place of each expert. EPLB's placement always fits the limits.
        if self.by_rank:
            solution = self.solve_linear(seconds)
            bound = solution.bound
            candidates = [eplb_places]
            if solution.places is not None:
                candidates.insert(0, solution.places)
        else:  # counts by pairs of experts make the program quadratic, so HiGHS cannot solve it
            candidates = [self.swapped(eplb_places), self.swapped(self.place_of(identity))]
            bound = self.companions_bound()
        fitting = [place_of for place_of in candidates if self.fits(place_of)]
        placements = [self.placed(PLACED, self.by_ranks(place_of)) for place_of in fitting]
        best = min(placements, key=lambda placed: placed.cost)
        # Rounding may lift the bound above the cost.
        return Answer((*baselines, best), min(float(bound), best.cost))

    def fits(self, place_of: Any) -> bool:
        """Return whether no region (cluster or node) has more tokens than its limit."""
        return all(
            self.load[self.np.isin(place_of, region)].sum() <= limit * (1 + LOAD_TOLERANCE)
            for region, limit in self.limited
        )

    def solve_linear(self, seconds: float) -> _Solution:
        """Assign experts to places (nodes) by an integer program, if tokens are counted by rank.

        With several clusters (regions), it first assigns experts to clusters. There the cost of an
        expert is that at the cluster's best place. Real costs are not lower, so this program's lower
        bound is returned. Then the experts of each cluster are assigned to its places.

        Args:
            seconds: Time limit of HiGHS, half of it for the regions.
        """
        np = self.np
        cost = self.table.T @ self.rank_cost[:, self.first_ranks]  # [experts, places]
        if not self.regions:
            return self.solve_program(cost, self.room, self.limits_of_regions, seconds)
        region_cost = np.stack([cost[:, region].min(1) for region in self.regions], 1)
        slots = np.array([self.room[region].sum() for region in self.regions])
        region_of, bound = self.solve_program(
            region_cost, slots, self.limits_of_regions, seconds / 2
        )
        if region_of is None:
            return _Solution(None, bound)
        place_of = np.zeros(len(self.load), int)
        region_seconds = seconds / 2 / len(self.regions)
        for number, region in enumerate(self.regions):
            experts = np.flatnonzero(region_of == number)
            chosen = self.places_within(cost, experts, region, region_seconds)
            place_of[experts] = np.array(region)[chosen]
        return _Solution(place_of, bound)

    def places_within(self, cost: Any, experts: Any, region: list[int], seconds: float) -> Any:
        """Distribute a cluster's experts over its nodes with the least cost, within load limits.

        A node has slots for experts. Its load per slot may be `balance` times the mean load of an
        expert. If EPLB's placement has a higher load per slot on a node, the highest is the limit.

        Args:
            cost: [experts, places] cost of an expert's tokens at a place (the ranks of a node).
            experts: Experts of the cluster.
            region: Places of the cluster.
            seconds: Time limit of the solver (HiGHS).

        Returns:
            Array: for each of `experts` the index of its place in `region`.
        """
        np = self.np
        ranks = [rank for place in region for rank in self.places.of[place]]
        eplb = self.place_of(self.packed(list(experts), ranks))
        # Index in `region` of EPLB's place of each expert. The places of a region ascend.
        eplb_within = np.searchsorted(region, eplb[experts])
        slots = self.room[region]  # of each place
        load = self.load[experts]
        fullest = (np.bincount(eplb_within, load, len(region)) / slots).max()
        limit = slots * max(fullest, self.balance * self.load.mean())
        solution = self.solve_program(
            cost[experts][:, region], room=slots, limit=limit, seconds=seconds, load=load
        )
        return eplb_within if solution.places is None else solution.places

    def solve_program(
        self, cost: Any, room: Any, limit: Any, seconds: float, load: Any = None
    ) -> _Solution:
        """Assign each expert to a place with the least total cost, by an integer program (HiGHS).

        Each place gets as many experts as it has slots, and no more load than its limit.

        Args:
            cost: [experts, places] cost of an expert's tokens at a place.
            room: Slots of each place.
            limit: Most load of each place.
            seconds: Time limit.
            load: Tokens of each expert in `cost`; None if these are all experts.
        """
        np = self.np
        experts, places = cost.shape
        if load is None:
            load = self.load
        scale = cost.max() or 1.0  # costs up to 1 suit the solver's tolerances
        identity = self.sparse.identity
        # Rows of the constraints over the variables x[e, p], in row-major order.
        places_of_expert = self.sparse.kron(identity(experts), np.ones((1, places)))
        experts_of_place = self.sparse.kron(np.ones((1, experts)), identity(places))
        load_of_place = self.sparse.kron(load[None, :], identity(places))
        constraint = self.optimize.LinearConstraint
        result = self.optimize.milp(
            (cost / scale).ravel(),
            integrality=np.ones(experts * places),
            bounds=self.optimize.Bounds(0, 1),
            constraints=[  # (matrix, least, most)
                constraint(places_of_expert.tocsr(), 1, 1),
                constraint(experts_of_place.tocsr(), room, room),
                constraint(load_of_place.tocsr(), -np.inf, limit),
            ],
            options={"time_limit": seconds, "mip_rel_gap": GAP},
        )
        bound = float(cost.min(1).sum())  # each expert at its best place, without any limit
        dual_bound = result.mip_dual_bound
        if dual_bound is not None and np.isfinite(dual_bound):
            bound = max(bound, float(dual_bound) * scale)
        if result.x is None:
            return _Solution(None, bound)
        return _Solution(result.x.reshape(experts, places).argmax(1), bound)

    def swapped(self, place_of: Any) -> Any:
        """Improve a placement by swapping pairs of experts, best pair first, while the cost falls.

        Tokens are counted by pairs of experts here: each goes to two experts, and costs as much as a
        message between the nodes of these two.

        Args:
            place_of: [experts] number of the place (node) of each expert.
        """
        np = self.np
        place_cost = self.place_cost
        place_of = place_of.copy()
        experts = np.arange(len(place_of))
        while True:
            is_at = np.eye(len(self.room))[place_of]  # [experts, places] 0 or 1
            cost_at = self.table @ is_at @ place_cost  # [experts, places] cost of the expert there
            current = cost_at[experts, place_of]
            # Gain of swapping experts i and j: the costs of both now, less their costs after it.
            # `swapped` moves i to the place of j, and j stays: then their common tokens are free.
            # In truth j moves, too, and these tokens cost as much as now. `between` adds that cost:
            # for i and for j, hence twice.
            swapped = cost_at[:, place_of]  # [i, j] cost of i at the place of j
            between = 2 * self.table * place_cost[place_of][:, place_of]
            gain = current[:, None] - swapped + current[None, :] - swapped.T - between
            loads = np.bincount(place_of, self.load, len(self.room))
            growth = self.load[None, :] - self.load[:, None]  # [i, j] load that i's place gains
            spare_load = self.limit - loads  # load that each place can still take
            # The place of j loses the load that the place of i gains.
            overfills_i = growth > spare_load[place_of][:, None] + ROUNDING
            overfills_j = -growth > spare_load[place_of][None, :] + ROUNDING
            gain[overfills_i | overfills_j] = 0
            i, j = np.unravel_index(gain.argmax(), gain.shape)
            if gain[i, j] <= ROUNDING * max(1.0, float(current.sum())):
                return place_of
            place_of[i], place_of[j] = place_of[j], place_of[i]

    def companions_bound(self) -> float:
        """Return a lower bound on the cost for tokens counted by pairs of experts.

        Each token goes to two experts, and costs something if they are on different nodes. A node
        has few slots. At best an expert shares its node with the experts that have most tokens in
        common with it. Its other tokens leave the node, at the least cost between nodes. The same
        holds for clusters; the larger of the two bounds is returned.
        """
        np = self.np
        costs = self.place_cost
        is_inside = costs <= INSIDE  # [from place, to place] inside a cluster
        across = costs[~is_inside]
        inside = costs[(costs > 0) & is_inside]
        # A pair for clusters, and another for nodes: least cost of a token that leaves; and for each
        # place (node), the slots of its whole cluster, or of itself.
        levels = [(float(across.min()) if across.size else 0.0, is_inside @ self.room)]
        if inside.size:
            levels.append((float(inside.min()), self.room))
        # Tokens each expert shares with others, fewest first; [:, 1:] drops the expert itself (0).
        ascending = np.sort(self.table, 1)[:, 1:]
        bounds = []
        for cost, slots in levels:
            # Experts without a slot in the largest node (cluster): an expert is apart from as many
            # others at least. At best they are those that share fewest tokens with it.
            elsewhere = len(self.load) - int(np.max(slots))
            # The sum has each token twice: for both of its experts.
            bounds.append(float(ascending[:, :elsewhere].sum()) * cost / 2)
        return max(bounds)
