"""Tests that operators give bitwise equal results, with equal strides, on an emulated GPU and on the CPU.

The operators and their sample inputs are those of torch's own tests (OpInfo). The short version of each test
takes two samples of the operator's first and last data type, and runs for one of four operators (tests/
selection.py). The exhaustive version takes all samples of all data types.
"""

import pytest

from integration_tests.gpu.operators import database


@pytest.mark.full(share=4)
@pytest.mark.parametrize("op", database.operators(), ids=database.title)
def test_same_bits(op, exhaustive):
    if reason := database.OTHERWISE.get(op.name) or database.OTHERWISE.get(database.title(op)):
        pytest.skip(reason)
    types = database.dtypes_of(op)
    for dtype in types if exhaustive else types[:1] + types[-1:]:
        assert list(database.differences(op, dtype, most=1000 if exhaustive else 2)) == []
