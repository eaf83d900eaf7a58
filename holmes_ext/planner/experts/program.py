"""The experts' places with the least traffic: an integer program, with the proof of how good its answer is.

Rows of ranks (arXiv 2508.09229, whose servers are places here; x is 1 where expert e lives at place p):

    least   sum_e sum_p x[e, p] sum_r counts[r, e] far[r, p]     what tokens pass on the way to their experts
    with    sum_p x[e, p] = 1         sum_e x[e, p] = slots of p
            sum_e x[e, p] load[e] <= limit of p                  no cluster computes for
                                                                 much more than its share

HiGHS (scipy.optimize.milp) solves it and bounds what any answer takes. Rows of experts (tokens that two
experts share, for dispatchers that send a token once to each place) make it quadratic; then experts are
swapped while that helps, and the bound is that an expert has so many companions at most as its place, or its
cluster, has other slots.

    EPLB    DeepSeek's heuristic without its copies of experts, which training cannot have: the fullest expert
            first, to the emptiest rank that has room. It knows no distances.

Its answer obeys the limits (they are not below its own loads), so ours never takes more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.plan.experts import RANK, Counts
from holmes_ext.plan.plan import Plan, load_plan
from holmes_ext.planner.experts.places import INSIDE, Places, places_of

#: What HiGHS need not improve on.
GAP = 0.002
IDENTITY, EPLB, PLACED = "identity", "EPLB", "placed"


@dataclass(frozen=True)
class Placed:
    """order: the expert of each slot, rank by rank; cost: of the program's aim; crossing, moving: parts of
    all tokens that cross clusters, nodes; fullest: rank's load by the mean."""

    name: str
    order: tuple[int, ...]
    cost: float
    crossing: float
    moving: float
    fullest: float


@dataclass(frozen=True)
class Answer:
    """placements: identity, EPLB, placed. bound: no order within the limits costs less."""

    placements: tuple[Placed, ...]
    bound: float

    @property
    def best(self) -> Placed:
        return self.placements[-1]

    @property
    def gap(self) -> float:
        """How much less than `best` an order could cost at most, as a part of it."""
        return max(0.0, 1 - self.bound / self.best.cost) if self.best.cost > 0 else 0.0


def solve(
    counts: Counts, places: Places, balance: float = 1.1, seconds: float = 10.0, per_rank: int = 0
) -> Answer:
    """balance: times the mean load that a place may have; seconds: for HiGHS; per_rank: experts that a rank
    holds at most (0: as many as there are for each). HolmesError: no fit, or no scipy."""
    ranks, experts = places.ranks, counts.experts
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
    """The order of experts with the least traffic. Its `order[s]` is the expert of slot s; slots are those of
    the group's first rank, then those of the second.

    Args:
        counts: Tokens, a row for each rank and a column for each expert.
        plan: With an expert-parallel size; a Plan, or the path of a plan.json.
        rows: "rank"; or "expert": a row for each expert, too, and counts are the tokens that both get.
        balance: A cluster gets so many times its share of tokens at most, or what EPLB gives it.

    Raises:
        HolmesError: The counts do not fit the plan, or scipy is missing.
    """
    known = load_plan(plan) if isinstance(plan, str) else plan
    return solve(
        Counts(rows, tuple(tuple(map(float, row)) for row in counts)), places_of(known), balance
    ).best


def _libraries() -> tuple[ModuleType, ModuleType, ModuleType]:
    try:
        import numpy
        from scipy import optimize, sparse
    except ModuleNotFoundError as error:
        raise HolmesError(
            f"placing experts needs {error.name}: pip install 'holmes_ext[experts]'"
        ) from None
    return numpy, optimize, sparse


class _Problem:
    def __init__(self, counts: Counts, places: Places, balance: float):
        self.np, self.optimize, self.sparse = np, _, _ = _libraries()
        self.places, self.slots = places, counts.experts // places.ranks
        self.of_ranks = counts.rows == RANK
        table = counts.folded(places.ranks) if self.of_ranks else counts.table
        self.table = np.array(table, float)
        if not self.of_ranks:
            self.table = (self.table + self.table.T) / 2
            np.fill_diagonal(self.table, 0)
        self.load, self.placements = self.table.sum(0), np.array(places.far)
        self.room = np.array([len(ranks) * self.slots for ranks in places.of])
        self.first = [ranks[0] for ranks in places.of]
        self.place_of_rank = {
            rank: place for place, ranks in enumerate(places.of) for rank in ranks
        }
        self.eplb = self.packed(range(counts.experts), range(places.ranks))
        self.far = self.placements[self.first][:, self.first]
        regions = list(dict.fromkeys(tuple(np.flatnonzero(row <= INSIDE)) for row in self.far))
        apart = sum(map(len, regions)) == len(self.far) and 1 < len(regions) < len(self.far)
        self.regions = [list(region) for region in regions] if apart else []
        self.balance = balance
        alone = [[place] for place in range(len(self.room))]
        self.limit = self.limits(alone)
        self.limits_of_regions = self.limits(self.regions) if self.regions else self.limit
        self.limited = list(zip(self.regions or alone, self.limits_of_regions))

    def limits(self, regions: list[list[int]]) -> Any:
        """Loads that each region may have: what EPLB needs for the fullest, or `balance` times its share."""
        np, eplb = self.np, self.place_of(self.eplb)
        rooms = np.array([self.room[region].sum() for region in regions])
        loads = np.array([self.load[np.isin(eplb, region)].sum() for region in regions])
        return rooms * max([self.balance * self.load.mean(), *(loads / rooms)])

    # Orders and what they cost

    def packed(self, experts: Sequence[int], ranks: Sequence[int]) -> dict[int, list[int]]:
        """Rank -> its experts: the fullest first, to the emptiest rank with room (EPLB)."""
        experts_of: dict[int, list[int]] = {rank: [] for rank in ranks}
        loads = dict.fromkeys(ranks, 0.0)
        for expert in sorted(experts, key=lambda e: (-self.load[e], e)):
            rank = min(
                (r for r in ranks if len(experts_of[r]) < self.slots), key=lambda r: (loads[r], r)
            )
            experts_of[rank].append(expert)
            loads[rank] += self.load[expert]
        return experts_of

    def place_of(self, experts_of: dict[int, list[int]]) -> Any:
        """[experts] the place of each one that a rank holds."""
        result = self.np.zeros(len(self.load), int)
        for rank, experts in experts_of.items():
            result[experts] = self.place_of_rank[rank]
        return result

    def held(self, place: Any) -> dict[int, list[int]]:
        result: dict[int, list[int]] = {}
        for p, ranks in enumerate(self.places.of):
            result |= self.packed(list(self.np.flatnonzero(place == p)), ranks)
        return result

    def total(self, experts_of: dict[int, list[int]], weights: Any) -> float:
        """Tokens times weights[rank, rank] of their ways."""
        rank_of = self.np.zeros(len(self.load), int)
        for rank, experts in experts_of.items():
            rank_of[experts] = rank
        if self.of_ranks:
            return float((self.table * weights[:, rank_of]).sum())
        return float((self.table * weights[rank_of][:, rank_of]).sum() / 2)

    def way(self, name: str, experts_of: dict[int, list[int]]) -> Placed:
        np, tokens = self.np, float(self.table.sum()) / (1 if self.of_ranks else 2) or 1.0
        loads = [self.load[experts_of[rank]].sum() for rank in sorted(experts_of)]
        crossing, moving = (
            self.total(experts_of, np.array(w)) / tokens
            for w in (self.places.crossing, self.places.moving)
        )
        order = tuple(int(expert) for rank in sorted(experts_of) for expert in experts_of[rank])
        fullest = max(loads) / (self.load.sum() / len(loads) or 1.0)
        return Placed(
            name,
            order,
            self.total(experts_of, self.placements),
            float(crossing),
            float(moving),
            float(fullest),
        )

    # The program

    def answer(self, seconds: float) -> Answer:
        ranks = range(self.places.ranks)
        identity = {rank: list(range(rank * self.slots, (rank + 1) * self.slots)) for rank in ranks}
        known = [self.way(IDENTITY, identity), self.way(EPLB, self.eplb)]
        if self.of_ranks:
            solution, bound = self.linear(seconds)
            starts = [start for start in (solution, self.place_of(self.eplb)) if start is not None]
        else:
            starts = [
                self.swapped(self.place_of(experts_of)) for experts_of in (self.eplb, identity)
            ]
            bound = self.companions()
        allowed = [start for start in starts if self.fits(start)]
        best = min(
            (self.way(PLACED, self.held(place)) for place in allowed),
            key=lambda placed: placed.cost,
        )
        return Answer((*known, best), min(float(bound), best.cost))  # not above it by rounding

    def fits(self, place: Any) -> bool:
        """Whether no region (where there are none, no place) has more than its limit."""
        return all(
            self.load[self.np.isin(place, region)].sum() <= limit * (1 + 1e-6)
            for region, limit in self.limited
        )

    def linear(self, seconds: float) -> tuple[Any, float]:
        """([experts] places or None, bound). Regions (places INSIDE of each other) are chosen first, as if an
        expert got the best place there: what bounds that bounds the whole."""
        np, cost = self.np, self.table.T @ self.placements[:, self.first]  # [experts, places]
        if not self.regions:
            return self.program(cost, self.room, self.limits_of_regions, seconds)
        region_cost = np.stack([cost[:, region].min(1) for region in self.regions], 1)
        rooms = np.array([self.room[region].sum() for region in self.regions])
        region_of, bound = self.program(region_cost, rooms, self.limits_of_regions, seconds / 2)
        if region_of is None:
            return None, bound
        places = np.zeros(len(self.load), int)
        for number, region in enumerate(self.regions):
            experts = np.flatnonzero(region_of == number)
            chosen = self.inside(cost, experts, region, seconds / 2 / len(self.regions))
            places[experts] = np.array(region)[chosen]
        return places, bound

    def inside(self, cost: Any, experts: Any, region: list[int], seconds: float) -> Any:
        """Places, numbered within the region; none gets more than the fullest one of packed experts."""
        experts_of = self.packed(
            list(experts), [rank for place in region for rank in self.places.of[place]]
        )
        packed = self.np.searchsorted(
            region, self.place_of(experts_of)[experts]
        )  # regions are ascending
        room, load = self.room[region], self.load[experts]
        fullest = (self.np.bincount(packed, load, len(region)) / room).max()
        limit = room * max(fullest, self.balance * self.load.mean())
        solution, _ = self.program(cost[experts][:, region], room, limit, seconds, load)
        return packed if solution is None else solution

    def program(
        self, cost: Any, room: Any, limit: Any, seconds: float, load: Any = None
    ) -> tuple[Any, float]:
        """cost: [experts, places]; ([experts] places or None, bound)."""
        np, (experts, places) = self.np, cost.shape
        load, scale = self.load if load is None else load, cost.max() or 1.0
        eye, ones = self.sparse.identity, np.ones
        placed_once = self.sparse.kron(eye(experts), ones((1, places)))
        slots_used = self.sparse.kron(ones((1, experts)), eye(places))
        loads = self.sparse.kron(load[None, :], eye(places))
        within = self.optimize.LinearConstraint
        result = self.optimize.milp(
            (cost / scale).ravel(),
            integrality=ones(experts * places),
            bounds=self.optimize.Bounds(0, 1),
            constraints=[
                within(placed_once.tocsr(), 1, 1),
                within(slots_used.tocsr(), room, room),
                within(loads.tocsr(), -np.inf, limit),
            ],
            options={"time_limit": seconds, "mip_rel_gap": GAP},
        )
        cheapest = float(cost.min(1).sum())  # each expert where it is best, whatever the room
        bound = result.mip_dual_bound
        bound = (
            cheapest
            if bound is None or not np.isfinite(bound)
            else max(cheapest, float(bound) * scale)
        )
        return (None if result.x is None else result.x.reshape(experts, places).argmax(1)), bound

    def swapped(self, place: Any) -> Any:
        """Two experts of different places at a time, the pair that helps most first."""
        np, far = self.np, self.far
        place = place.copy()
        while True:
            at = np.eye(len(self.room))[place]
            sums = self.table @ at @ far  # [experts, places]: what it costs there
            here, there = (
                sums[np.arange(len(place)), place],
                sums[:, place],
            )  # there[i, j]: i where j is
            gain = (
                here[:, None]
                - there
                + here[None, :]
                - there.T
                - 2 * self.table * far[place][:, place]
            )
            loads = np.bincount(place, self.load, len(self.room))
            more = self.load[None, :] - self.load[:, None]  # [i, j]: what the place of i gets more
            room = self.limit - loads
            gain[(more > room[place][:, None] + 1e-9) | (-more > room[place][None, :] + 1e-9)] = 0
            i, j = np.unravel_index(gain.argmax(), gain.shape)
            if gain[i, j] <= 1e-9 * max(1.0, float(here.sum())):
                return place
            place[i], place[j] = place[j], place[i]

    def companions(self) -> float:
        """What an expert's own and neighbouring slots cannot hold goes to others, the least first."""
        np, far = self.np, self.far
        across = far[far > INSIDE]
        levels = [(float(across.min()) if across.size else 0.0, (far <= INSIDE) @ self.room)]
        inside = far[(far > 0) & (far <= INSIDE)]
        levels += [(float(inside.min()), self.room)] if inside.size else []
        ordered = np.sort(self.table, 1)[:, 1:]  # of the others, ascending: the largest stay
        return max(
            float(ordered[:, : len(self.load) - int(np.max(slots))].sum()) * price / 2
            for price, slots in levels
        )
