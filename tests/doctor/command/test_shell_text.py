"""Tests that the text of `bash -c "..."` is split as a shell splits it."""

import shutil
import subprocess

import pytest

from holmes_ext.doctor.command.shell_text import has_variable, simple_commands

#: Text -> the words of its commands, with SIZE=8 and NAME="a b" in the environment.
TEXTS = {
    "torchrun a.py --x 1": ["torchrun", "a.py", "--x", "1"],
    "torchrun \\\n a.py \\\n --x 1\n": ["torchrun", "a.py", "--x", "1"],
    "a.py --x 'one two' \"three 'four'\" five\\ six": [
        "a.py",
        "--x",
        "one two",
        "three 'four'",
        "five six",
    ],
    "a.py --size $SIZE --b=${SIZE}x \"$NAME\" $NAME '$NAME'": [
        "a.py",
        "--size",
        "8",
        "--b=8x",
        "a b",
        "a",
        "b",
        "$NAME",
    ],
    "a.py ${MISSING:-4} ${SIZE:-4} ''": ["a.py", "4", "8", ""],
    "A='--x 1' B=2; a.py $A $B": ["a.py", "--x", "1", "2"],
    "export A=3\na.py $A": ["a.py", "3"],
    "a.py --n 2 > log 2>&1": ["a.py", "--n", "2"],
    "a.py --n 2 &> log": ["a.py", "--n", "2"],
    "a.py 2>/dev/null --x # a comment": ["a.py", "--x"],
    "exec a.py a#b": ["a.py", "a#b"],
    "A=(--x 'one two' # a comment\n -y); A+=(3); a.py \"${A[@]}\" $A": [
        "a.py",
        "--x",
        "one two",
        "-y",
        "3",
        "--x",
    ],
    "N=2; a.py $((N * $SIZE + 1)) --n=$(( (7 - N) / 2 )) $((${N}%2))": ["a.py", "17", "--n=2", "0"],
    "a.py ${MISSING:-${SIZE:-4}} ${MISSING-x} ${SIZE:=9}": ["a.py", "8", "x", "8"],
    'EMPTY=(); A=1; A+=2; a.py $A "${EMPTY[@]}"': ["a.py", "12"],
    "cat <<EOF\nit's $SIZE\nEOF\na.py 1": ["a.py", "1"],
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_command_is_split_into_the_words_of_the_shell(text, monkeypatch):
    """A real shell, which prints the words that a.py would get, agrees with the table."""
    environ = {"SIZE": "8", "NAME": "a b"}
    assert simple_commands(text, environ)[-1] == TEXTS[text]
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    programs = (
        'a.py() { printf "%s\\0" a.py "$@" >&3; }; torchrun() { printf "%s\\0" torchrun "$@" >&3; }'
    )
    result = subprocess.run(
        ["bash", "-c", f"exec 3>&1 >/dev/null; {programs}; {text.replace('exec ', '')}"],
        env=environ,
        capture_output=True,
        check=True,
        cwd="/tmp",
    )
    assert result.stdout.decode().split("\0")[:-1] == TEXTS[text]


def test_commands_end_at_separators():
    text = "cd /w && (module load cuda; torchrun a.py) || exit 1\nb.py | tee log &"
    assert simple_commands(text, {}) == [
        ["cd", "/w"],
        ["module", "load", "cuda"],
        ["torchrun", "a.py"],
        ["exit", "1"],
        ["b.py"],
        ["tee", "log"],
    ]


@pytest.mark.parametrize(
    "word", ["$A", "${A}", "--x=$A", "$(cat f)", "`cat f`", "${A[@]}", "$1", "$@"]
)
def test_what_only_a_running_shell_replaces_stays(word):
    assert simple_commands(f"a.py {word}", {}) == [["a.py", word]]
    assert has_variable(word)


@pytest.mark.parametrize("text", ["'", '"', "\\", "$(", "`", ">", "${", "$", "a 'b", "((((", "#"])
def test_a_text_that_ends_too_early_is_no_error(text):
    assert isinstance(simple_commands(text, {}), list)
