from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated

import pytest

from holmes_ext.checks import Between, Each, Matches, OneOf, Satisfies, check_fields
from holmes_ext.document import Table
from holmes_ext.errors import HolmesError

WORD = Matches(re.compile("[a-z]+"), "a word")


@dataclass(frozen=True)
class Port:
    number: Annotated[int, Between(0, 255, "a port number")]
    state: Annotated[str, OneOf(("up", "down"))] = "down"
    seconds: Annotated[float | None, Between(0)] = None
    share: Annotated[float, Between(0, 0.5)] = 0.0
    names: Annotated[tuple[str, ...], Each(WORD, "a list of words")] = ()
    word: Annotated[str, Matches(re.compile("[a-z]+"), "a word", may_be_empty=True)] = ""
    even: Annotated[int, Satisfies(lambda number: number % 2 == 0, "even")] = 0
    unchecked: int = 0

    def __post_init__(self):
        check_fields(self, "the port")


def test_allowed_values():
    assert Port(0, "up", 1.5, 0.5, ("a", "bc"), "a", 4, -1).seconds == 1.5
    assert Port(255, seconds=None).seconds is None


@pytest.mark.parametrize(
    "values, message",
    [
        ({"number": 256}, "key 'number' must be a port number (0 to 255), not 256"),
        ({"number": -1}, "key 'number' must be a port number (0 to 255), not -1"),
        ({"state": "UP"}, "key 'state' must be one of up, down, not 'UP'"),
        ({"seconds": -0.5}, "key 'seconds' must be 0 or more, not -0.5"),
        ({"seconds": math.inf}, "key 'seconds' must be 0 or more, not inf"),
        ({"seconds": math.nan}, "key 'seconds' must be 0 or more, not nan"),
        ({"share": 0.75}, "key 'share' must be 0 to 0.5, not 0.75"),
        ({"names": ("a", "b1")}, "key 'names' must be a list of words, not ('a', 'b1')"),
        ({"word": "A"}, "key 'word' must be a word or '', not 'A'"),
        ({"even": 3}, "key 'even' must be even, not 3"),
        ({"state": "x", "number": -1}, "key 'number' must be a port number (0 to 255), not -1"),
    ],
)
def test_values_that_are_not_allowed(values, message):
    with pytest.raises(HolmesError, match=f"^the port: {re.escape(message)}$"):
        Port(**{"number": 0, **values})


def test_a_file_s_value_is_named_by_its_whole_key():
    table = Table({"ports": [{"number": 0}, {"number": 300}]}, "f.toml")
    message = "f.toml: key 'ports[1].number' must be a port number (0 to 255), not 300"
    with pytest.raises(HolmesError, match=f"^{re.escape(message)}$"):
        [port.into(Port) for port in table.tables("ports")]
