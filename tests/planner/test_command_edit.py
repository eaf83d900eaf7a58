"""Tests the changes to the words of a training command, and to the keys of a ds_config."""

import pytest

from holmes_ext.planner.command_edit import by_flag, edited, edited_config
from holmes_ext.planner.plan_flags import ANY_WORDS, NEEDS, WORDS_AFTER

TABLE = {"--size": 1, "--old": 0, "--listed": ANY_WORDS, "--method": 1}


def changed(text, wanted="", unwanted=""):
    edit, command = edited(text.split(), by_flag(wanted.split()), TABLE, unwanted.split())
    return edit, " ".join(command)


@pytest.mark.parametrize(
    "before, wanted, unwanted, after",
    [
        ("run a.py --size 4 --x", "--size 1", "", "run a.py --size 1 --x"),
        ("a.py --size=4 data.bin", "--size 1", "", "a.py --size=1 data.bin"),
        ("a.py --size 1", "--size 1", "", "a.py --size 1"),
        ("a.py", "--size 1 --new", "", "a.py --size 1 --new"),
        ("a.py --old data.bin", "", "--old", "a.py data.bin"),
        ("a.py --size 4 data.bin", "", "--size", "a.py data.bin"),
        ("a.py --listed 1 2 3 --x", "", "--listed", "a.py --x"),
        ("a.py --size 2 --x --size 4", "--size 1", "", "a.py --x --size 1"),
        ("a.py --size 1 --x --size 4", "--size 4", "", "a.py --x --size 4"),
        ("a.py --size", "--size 2", "", "a.py --size 2"),
        ("a.py --size --x", "", "--size", "a.py --x"),
        ("a.py --sizes 4", "", "--size", "a.py --sizes 4"),
    ],
)
def test_words_of_a_command(before, wanted, unwanted, after):
    assert changed(before, wanted, unwanted)[1] == after


def test_lines_name_what_to_remove_to_change_and_to_add():
    edit, _ = changed("a.py --old --size 4 --method full", "--size 1 --new 2", "--old --method")
    assert edit.lines() == ["remove --old --method full", "change --size 4 -> 1", "add --new 2"]


def test_a_value_with_spaces_is_quoted_as_in_a_shell():
    edit, command = edited(["a.py"], {"--file": ("my plan.json",)}, TABLE, [])
    assert edit.add == ("--file 'my plan.json'",)
    assert command == ("a.py", "--file", "my plan.json")


def test_keys_of_a_ds_config():
    config = {"fp16": {"enabled": True}, "zero_optimization": {"stage": 1, "overlap_comm": True}}
    wanted = {"zero_optimization.stage": 2, "train_batch_size": 8, "pipeline.stages": 2}
    edit, new = edited_config(config, wanted, ["zero_optimization.overlap_comm", "other.key"])
    assert edit.lines() == [
        "remove zero_optimization.overlap_comm",
        "change zero_optimization.stage 1 -> 2",
        "add train_batch_size 8 pipeline.stages 2",
    ]
    assert new == {
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "train_batch_size": 8,
        "pipeline": {"stages": 2},
    }
    assert config["zero_optimization"] == {"stage": 1, "overlap_comm": True}  # unchanged


def test_every_flag_that_needs_a_property_has_a_number_of_words():
    assert set(NEEDS) <= set(WORDS_AFTER)
