"""lab/holmes_lab/cli/lab.py: bad usage is one line; what is printed of which rank."""

import argparse

import clusters
import pytest
from holmes_lab.cli import lab

from holmes_ext.errors import HolmesError

FILE = clusters.toml("a ethernet - a0,a1")


@pytest.fixture
def parse(tmp_path):
    (tmp_path / "c.toml").write_text(FILE)
    parser, file = argparse.ArgumentParser(), str(tmp_path / "c.toml")
    lab.add_parser(parser.add_subparsers())
    return lambda *words: parser.parse_args(
        ["lab", *(file if word == "FILE" else word for word in words)]
    )


@pytest.mark.parametrize(
    "words, message",
    [
        (["run", "--cluster", "FILE"], "no command"),
        (["run", "--cluster", "FILE", "--"], "no command"),
        (["run", "--cluster", "no.toml", "--", "true"], "no.toml"),
        (["run", "--cluster", "FILE", "--env", "X", "--", "true"], "--env: 'X'"),
        (["run", "--cluster", "FILE", "--scale", "0", "--", "true"], "--scale"),
        (
            ["run", "--cluster", "FILE", "--", "torchrun", "--nproc-per-node", "2", "t.py", "--x"],
            "-- python t.py --x$",
        ),
        (
            ["run", "--cluster", "FILE", "--", "python", "-m", "torch.distributed.run", "t.py"],
            "a job of its own",
        ),
        (
            ["run", "--cluster", "FILE", "--", "/usr/bin/deepspeed", "--num_gpus", "2", "t.py"],
            "-- python t.py$",
        ),
        (
            ["run", "--cluster", "FILE", "--", "torchrun", "-m", "package.train", "--steps", "2"],
            "-- python -m package.train --steps 2$",
        ),
        (["measure", "--cluster", "no.toml"], "no.toml"),
    ],
)
def test_bad_usage_is_one_line(parse, words, message):
    args = parse(*words)
    with pytest.raises(HolmesError, match=message):
        lab.run(args)


def test_agents_of_one_job_and_plain_scripts_are_no_launcher_of_their_own():
    for words in (
        ["torchrun", "--nnodes=4", "--rdzv-endpoint", "a0:29400", "t.py"],
        ["python", "deepspeed.py"],
        ["sh", "-c", "torchrun t.py"],
        ["python", "t.py", "deepspeed"][:2],
    ):
        lab.refuse_launcher(words)


def test_the_command_keeps_its_own_flags(parse):
    args = parse(
        "run",
        "--cluster",
        "FILE",
        "--quiet",
        "--",
        "python",
        "x.py",
        "--quiet",
        "--",
        "--cluster",
        "z",
    )
    assert (
        args.command == ["--", "python", "x.py", "--quiet", "--", "--cluster", "z"] and args.quiet
    )


def test_lines_carry_node_and_local_rank(capsys):
    printer = lab._Printer(False, ["a0:0", "a0:1"])
    printer(1, "hello", "stdout")
    printer(0, "oops", "stderr")
    assert capsys.readouterr() == ("[a0:1] hello\n", "[a0:0] oops\n")


def test_quiet_prints_rank_0_and_the_end_of_one_that_failed(capsys):
    printer = lab._Printer(True, ["a0:0", "a1:0"])
    lines = {0: [("stdout", "zero")], 1: [("stdout", f"line {number}") for number in range(30)]}
    for rank in lines:
        for stream, line in lines[rank]:
            printer(rank, line, stream)
    printer.failed(1, 3, lines)
    out, err = capsys.readouterr()
    assert out == "zero\n"
    assert (
        err.splitlines()[0] == "[a1:0] line 10"
        and len(err.splitlines()) == 21
        and "rank 1 (a1:0)" in err
    )
