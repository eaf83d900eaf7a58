"""engine: what an engine says of itself."""

import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.patches import features
from holmes_ext.patches.traits import ENGINES, any_engine
from holmes_ext.plan.engine import ABILITIES, EngineTraits


@pytest.mark.parametrize(
    "change, word", [({"sends": "thrown"}, "sends 'thrown'"), ({"features": {"fly": ()}}, "'fly'")]
)
def test_bad_traits_are_told(change, word):
    with pytest.raises(HolmesError, match=f"engine odd: .*{word}"):
        EngineTraits("odd", **change)


def test_an_ability_lasts_as_long_as_its_features_are_on():
    one = EngineTraits(features={"tied": ("x", "y")})
    assert (
        one.can("tied")
        and one.can("tied", {"z"})
        and not one.can("tied", {"x"})
        and not one.can("overlap")
    )


def test_engines_name_features_that_there_are():
    known = set(features())
    for engine in (*ENGINES.values(), any_engine()):
        assert {name for names in engine.features.values() for name in names} <= known
    assert set(any_engine().features) == set(ABILITIES)
