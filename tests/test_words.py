import io
import os
import sys

from holmes_ext.words import counted, did_you_mean, grouped, nearest, print_line, some_of, why


def test_nearest():
    assert nearest("clustr", ["cluster", "plan"]) == "cluster"
    assert nearest("xyz", ["cluster", "plan"]) == nearest("a", []) == ""
    assert nearest("clu", ["cluster"], cutoff=0.9) == ""


def test_did_you_mean():
    assert did_you_mean("clustr", ("cluster", "plan")) == "did you mean 'cluster'?"
    assert (
        did_you_mean("clustr", ("cluster",), lambda name: f"--{name}") == "did you mean --cluster?"
    )
    assert did_you_mean("xyz", iter(("cluster", "plan"))) == "known: cluster, plan"
    assert did_you_mean("xyz", ()) == "known: none"


def test_some_of():
    assert some_of(range(8)) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert some_of(range(9)) == "0, 1, 2, 3, 4, 5, 6, 7, and 1 more"
    assert some_of(["a", "b", "c"], 1, "; ") == "a; and 2 more"
    assert some_of([]) == ""


def test_why():
    assert (
        why(FileNotFoundError(2, "No such file or directory", "f")) == "No such file or directory"
    )
    assert why(ValueError("embedded null byte")) == "embedded null byte"


def test_grouped():
    assert grouped([("b", 1), ("a", 2), ("b", 3)]) == {"b": [1, 3], "a": [2]}


def test_a_number_with_its_noun():
    assert [counted(number, "node") for number in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]
    assert counted(1, "process") == "1 process" and counted(8, "process") == "8 processes"
    assert counted(2, "micro-batch") == "2 micro-batches"
    assert counted(1, "entry") == "1 entry" and counted(2, "entry") == "2 entries"
    assert counted(2, "key") == "2 keys"
    assert (
        counted(1, "layer", "are") == "1 layer is" and counted(3, "layer", "are") == "3 layers are"
    )


class PipeWithoutReader(io.StringIO):
    def flush(self):
        raise BrokenPipeError


def test_a_process_goes_on_when_the_reader_of_its_lines_has_ended(monkeypatch, capsys):
    print_line("read")
    assert capsys.readouterr().out == "read\n"
    monkeypatch.setattr(sys, "stdout", PipeWithoutReader())
    print_line("lost")
    with sys.stdout:
        assert sys.stdout.name == os.devnull
        print_line("lost, too")
