"""Muon's outer step: orthogonal, as long as before, the same bits in whatever order products are summed."""

import math
import random
from itertools import pairwise

import pytest
import torch

from holmes_ext.join import orthogonal
from holmes_ext.join.orthogonal import Matrices, Matrix, frobenius, is_matrix
from holmes_ext.join.settings import OuterSettings, parse_outer
from holmes_ext.join.shards.job_ranks import gather_cut_matrices
from holmes_ext.join.shards.ownership import any_range_is_divided, fragment_cuts, owners
from holmes_ext.join.shards.state import OuterState, Pending
from holmes_ext.join.shards.weights import Part, Tensor, Weights

SHAPES = {
    "a.weight": (24, 40),
    "a.bias": (24,),
    "b.weight": (64, 16),
    "table": (900, 8),
    "c.weight": (8, 8),
}
MATRICES = ["a.weight", "b.weight", "c.weight"]


def weights(parts=None):
    tensors = [Tensor(name, shape, "float32") for name, shape in SHAPES.items()]
    total = sum(math.prod(shape) for shape in SHAPES.values())
    flat = torch.randn(total, generator=torch.Generator().manual_seed(0))
    return Weights("all", tensors, [Part(0, flat)] if parts is None else parts)


@pytest.mark.parametrize("rows, columns", [(24, 40), (40, 24), (1, 7), (128, 128), (33, 500)])
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e6])
def test_the_result_is_orthogonal_and_as_long_as_before(rows, columns, scale):
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * scale
    result = orthogonal.orthogonal(matrix.clone())
    assert result.norm().item() == pytest.approx(matrix.norm().item(), rel=0.01)
    values = torch.linalg.svdvals(result / result.norm() * min(rows, columns) ** 0.5)
    assert values.min() > 0.2 and values.median() > 0.7 and values.max() < 1.4
    assert (result * matrix).sum() > 0


def test_zeros_stay_zeros():
    assert torch.equal(orthogonal.orthogonal(torch.zeros(4, 3)), torch.zeros(4, 3))


@pytest.mark.parametrize("rows, columns", [(48, 200), (160, 40)])
def test_the_bits_do_not_depend_on_the_order_of_sums(rows, columns, monkeypatch):
    """As another machine would sum: products one by one, from the last to the first, in another layout."""
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(2)) ** 3
    expected = orthogonal.orthogonal(matrix.clone())
    product = torch.Tensor.__matmul__

    def backwards(x, y):
        order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(x.shape[1]))
        total = torch.zeros(x.shape[0], y.shape[1], dtype=x.dtype)
        for k in order.tolist():
            total += x[:, k, None] * y[None, k]
        assert torch.equal(total, product(x, y)), "a sum was rounded"
        return total

    monkeypatch.setattr(torch.Tensor, "__matmul__", backwards)
    found = orthogonal.orthogonal(matrix.clone())
    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    assert torch.equal(found, expected)


def test_a_length_is_exact_enough_with_one_large_element():
    matrix = torch.full((2000, 500), 1e-5)
    matrix[3, 4] = 1.0
    assert frobenius(matrix) == pytest.approx(matrix.double().norm().item(), rel=0.05)
    assert frobenius(torch.zeros(3, 3)) == 0


def test_layers_are_matrices_and_tables_and_vectors_are_not():
    assert is_matrix((4096, 11008)) and is_matrix((28672, 4096)) and is_matrix((2, 3))
    assert not is_matrix((128_000, 4096)) and not is_matrix((64,)) and not is_matrix((1, 8))
    assert not is_matrix((3, 3, 8))
    assert [(one.rows, one.columns) for one in weights().matrices] == [
        SHAPES[name] for name in MATRICES
    ]


def test_only_matrices_are_made_orthogonal():
    here = weights()
    state = OuterState(
        OuterSettings(algorithm="muon", fragments=1),
        here,
        owners(here.total, [0, here.total], {0: here.holdings}),
        0,
    )
    plain = OuterState(
        OuterSettings(algorithm="diloco", fragments=1),
        here,
        owners(here.total, [0, here.total], {0: here.holdings}),
        0,
    )
    gradient = torch.randn(here.total, generator=torch.Generator().manual_seed(3))
    for one in (state, plain):
        one.fragments[0].pending.append(Pending(1, gradient.clone(), mu=0.3))
        one.apply(one.fragments[0])
    muon, diloco = (one.fragments[0].anchor for one in (state, plain))
    place = 0
    for name, shape in SHAPES.items():
        span = slice(place, place := place + math.prod(shape))
        assert torch.equal(muon[span], diloco[span]) == (name not in MATRICES), name


@pytest.mark.parametrize("fragments", [1, 2, 4])
def test_what_replicas_share_and_what_is_given_away_have_the_bits_of_the_whole(fragments):
    """Three ranks, and one, take the same steps; a piece for another job has what is pending, too."""
    one = weights()
    whole = [(matrix.start, matrix.stop) for matrix in one.matrices]
    settings = OuterSettings(algorithm="muon", fragments=fragments)
    cuts = fragment_cuts(one.total, fragments, whole)
    gradient = torch.randn(one.total, generator=torch.Generator().manual_seed(4))
    rows = []
    for ranks in (1, 3):
        maps = owners(one.total, cuts, dict.fromkeys(range(ranks), one.holdings), whole)
        assert not any_range_is_divided(maps, whole)
        row, given = torch.empty(one.total), torch.empty(one.total)
        for rank in range(ranks):
            state = OuterState(settings, one, maps, rank)
            for fragment in state.fragments:
                mine = torch.cat([gradient[a:b] for a, b in fragment.ranges] or [torch.empty(0)])
                fragment.pending.append(Pending(1, mine, mu=0.5))
                for a, b in fragment.ranges:
                    middle = (a + b) // 2
                    for start, stop in ((a, middle), (middle, b)):
                        given[start:stop] = state.copy_of(fragment, start, stop)[1]
                state.apply(fragment)
                for a, b in fragment.ranges:
                    row[a:b] = fragment.anchor[fragment.places(a, b)]
        assert torch.equal(row, given)
        rows.append(row)
    assert torch.equal(*rows)


def test_cuts_go_around_matrices_for_any_model():
    source = random.Random(0)
    for _ in range(200):
        stage_links = sorted(source.sample(range(1, 5000), 8))
        whole = list(zip(stage_links[::2], stage_links[1::2]))
        cuts = fragment_cuts(5000, source.randint(1, 6), whole)
        assert cuts == sorted(cuts) and cuts[0] == 0 and cuts[-1] == 5000
        maps = owners(
            5000, cuts, {rank: [(0, 5000)] for rank in range(source.randint(1, 5))}, whole
        )
        assert not any_range_is_divided(maps, whole)


def test_a_shard_that_cuts_a_matrix_is_found():
    maps = owners(100, [0, 100], {0: [(0, 50)], 1: [(50, 100)]}, [(10, 20), (40, 60)])
    assert any_range_is_divided(maps, [(10, 20), (40, 60)]) and not any_range_is_divided(
        maps, [(10, 50), (50, 60)]
    )


class Holders:
    """All ranks of the position, with what they would gather."""

    def __init__(self, row):
        self.row = row

    def gather(self, fragment, mine):
        middle = (fragment.start + fragment.stop) // 2
        return [
            Part(a, self.row[a:b]) for a, b in ((fragment.start, middle), (middle, fragment.stop))
        ]


@pytest.mark.parametrize("fragments", [1, 2])
def test_shards_of_matrices_take_the_step_of_the_whole(fragments):
    one, mu = weights(), 0.5
    whole = [(matrix.start, matrix.stop) for matrix in one.matrices]
    settings = OuterSettings(algorithm="muon", fragments=fragments)
    pieces = fragment_cuts(one.total, fragments, whole)
    gradient = torch.randn(one.total, generator=torch.Generator().manual_seed(6))
    stage_links = [0, 500, 501, 2000, one.total]  # a.weight and b.weight are cut
    shards = {rank: [span] for rank, span in enumerate(pairwise(stage_links))}
    rows = []
    for holdings in ({0: one.holdings}, shards):
        maps, row = owners(one.total, pieces, holdings, whole), torch.empty(one.total)
        assert any_range_is_divided(maps, whole) == (len(holdings) > 1)
        for rank in holdings:
            state = OuterState(settings, one, maps, rank)
            if len(holdings) > 1:
                holders = Holders(gradient + gradient * mu)
                gather_cut_matrices(state.fragments, state.matrices, holders, torch.device("cpu"))
            for fragment in state.fragments:
                mine = torch.cat([gradient[a:b] for a, b in fragment.ranges] or [torch.empty(0)])
                fragment.pending.append(Pending(1, mine, mu=mu))
                assert fragment.copy_version == (len(holdings) == 1)
                for a, b in fragment.ranges[:1]:
                    before, version = (
                        fragment.anchor[fragment.places(a, b)].clone(),
                        fragment.copy_version,
                    )
                    given = state.copy_of(fragment, a, b)
                    assert given[0] == version and torch.equal(given[1], before) == (version == 0)
                state.apply(fragment)
                for a, b in fragment.ranges:
                    row[a:b] = fragment.anchor[fragment.places(a, b)]
        rows.append(row)
    assert torch.equal(*rows)


def test_on_a_device_matrices_take_the_same_step():
    flat = torch.randn(24 * 40, generator=torch.Generator().manual_seed(5))
    here, there = flat.clone(), flat.clone()
    Matrices([Matrix(0, 24, 40)]).orthogonalize(here)
    Matrices([Matrix(0, 24, 40)], torch.device("cpu")).orthogonalize(there)
    assert torch.equal(here, there) and not torch.equal(here, flat)


def test_muon_s_round_has_four_fragments():
    assert parse_outer("algorithm=muon").fragments == 4
