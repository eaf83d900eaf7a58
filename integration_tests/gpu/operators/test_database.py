"""Hundreds of operators of torch's own database: the same bits on the CPU and on an emulated GPU, and the
same strides.

Exhaustive: all samples and types; else 2 samples of the first type and of one other.
"""

import pytest

from integration_tests.gpu.operators import database


@pytest.mark.parametrize("op", database.operators(), ids=database.title)
def test_same_bits(op, exhaustive):
    if reason := database.OTHERWISE.get(op.name) or database.OTHERWISE.get(database.title(op)):
        pytest.skip(reason)
    types = database.dtypes_of(op)
    for dtype in types if exhaustive else types[:1] + types[-1:]:
        assert list(database.differences(op, dtype, most=1000 if exhaustive else 2)) == []
