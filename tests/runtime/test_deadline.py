import threading

import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.deadline import within


def test_the_value_and_the_error_of_the_function():
    assert within(30, "late", divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        within(30, "late", divmod, 7, 0)


def test_an_end_for_what_has_none():
    never = threading.Event()
    with pytest.raises(HolmesError, match="the store does not answer"):
        within(0.05, "the store does not answer", never.wait)
    never.set()
