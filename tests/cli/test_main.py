"""cli/main.py: how a command ends if nobody reads its output, the disk is full or its name is misspelt."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holmes_ext.cli import main as module
from holmes_ext.cli.main import commands, main, parser_of

CLUSTER = str(Path(__file__).parents[2] / "examples/clusters/two_clusters_4.toml")
PRINTING = [
    ["--help"],
    *([name, "--help"] for name in commands()),
    ["discover"],
    ["discover", "--json"],
    ["doctor"],
    ["patches"],
    ["patches", "--json"],
    ["plan", "--cluster", CLUSTER, "--sizes", "pipeline=2"],
    ["plan", "--cluster", CLUSTER, "--sizes", "pipeline=2", "--json"],
]


@pytest.mark.parametrize(
    "arguments", PRINTING, ids=lambda words: " ".join(map(os.path.basename, words))
)
def test_a_closed_pipe_is_no_error(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "holmes_ext.cli.main", *arguments]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    "arguments", [["discover"], ["plan", "--cluster", CLUSTER, "--sizes", "pipeline=2", "--json"]]
)
def test_a_full_disk_is_one_line(arguments):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "holmes_ext.cli.main", *arguments]
        result = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert result.returncode == 2
    assert result.stderr == "holmes: the output cannot be written: No space left on device\n"


def test_a_socket_that_breaks_is_no_closed_pipe(monkeypatch):
    def parse(argv):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(module, "_parse_arguments", parse)
    with pytest.raises(BrokenPipeError):
        main(["discover"])


def test_a_misspelt_command_is_named(capsys):
    assert main(["discovr"]) == 2
    assert (
        capsys.readouterr().err
        == "holmes: there is no command 'discovr'; did you mean 'discover'?\n"
    )
    assert main(["zzz"]) == 2
    assert "known: discover, doctor" in capsys.readouterr().err


def test_a_flag_is_not_abbreviated(capsys):
    assert main(["plan", "--cluster", CLUSTER, "--pipelin", "2"]) == 2
    assert (
        capsys.readouterr().err
        == "holmes: plan has no option --pipelin; did you mean '--pipeline'?\n"
    )
    assert main(["lab", "run", "--cluster", CLUSTER, "--interleav", "--", "true"]) == 2
    assert capsys.readouterr().err == (
        "holmes: lab run has no option --interleav; did you mean '--interleave'?\n"
    )


def test_holmes_alone_says_what_to_do_first(capsys):
    """Its commands are there, and it fits 120 columns."""
    assert main([]) == 0
    said = capsys.readouterr().out
    assert set(re.findall(r"^  holmes (\w+)", said, re.MULTILINE)) <= set(commands())
    assert all(
        words in said for words in ("holmes demo", "holmes plan --cluster", "YOUR COMMAND --holmes")
    )
    assert max(map(len, said.splitlines())) <= 120


@pytest.mark.parametrize("name", list(commands()))
def test_help_is_whole_sentences_and_says_every_option(name):
    """Each command has a description, and each option has a help text.

    No help text names a source file.
    """
    parsers = [parser_of(name)]
    for parser in parsers:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
            else:
                assert action.help, (parser.prog, action.option_strings)
        assert parser.description and parser.description.strip().endswith("."), parser.prog
        assert "(runtime/" not in parser.format_help() and "holmes_ext/" not in parser.format_help()
