"""Names that changed are rejected in one line with the new name (holmes_ext/words.py)."""

from dataclasses import fields

import pytest

from holmes_ext import extensions, words
from holmes_ext.document import Table
from holmes_ext.errors import HolmesError
from holmes_ext.options import choices_of, names
from holmes_ext.patches import features
from holmes_ext.patches.engine.registry import disabled_features
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.traffic import StageLink, Traffic

FORMATS = {field.name for cls in (Plan, Traffic, StageLink) for field in fields(cls)}


def test_new_names_exist_and_old_names_do_not():
    for new_names, existing in (
        (words.RENAMED_OPTIONS, names()),
        (words.RENAMED_FEATURES, (*features(), *extensions.features())),
        (words.RENAMED_PLAN_KEYS, FORMATS),
    ):
        for old, new in new_names.items():
            assert new in existing and old not in existing, (old, new)
    for (option, old), new in words.RENAMED_VALUES.items():
        assert new in choices_of(option) and old not in choices_of(option)


@pytest.mark.parametrize("old, new", words.RENAMED_FEATURES.items())
def test_an_old_feature_is_rejected(old, new):
    with pytest.raises(HolmesError, match=f"'{old}' is called '{new}' now$"):
        disabled_features({"HOLMES_DISABLE": old}, features())


@pytest.mark.parametrize("old, new", words.RENAMED_PLAN_KEYS.items())
def test_an_old_key_is_rejected(old, new):
    table = Table({old: 1, new: 1}, "plan.json")
    table.take(new, int)
    with pytest.raises(HolmesError, match=f"key '{old}' is not known; it is called '{new}' now$"):
        table.done()
