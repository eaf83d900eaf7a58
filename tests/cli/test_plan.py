"""holmes plan: what it prints, what it writes, how it exits."""

import argparse
import json
import os
from pathlib import Path

import pytest
from plan_command import holmes

from holmes_ext.cli import plan as command
from holmes_ext.cli.main import main
from holmes_ext.errors import HolmesError
from holmes_ext.plan.plan import load_plan

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"


def test_table(capsys):
    assert holmes("--sizes", "pipeline=2") == 0
    text = capsys.readouterr().out
    for part in ("a[0-1]", "b[0-1]", "ethernet", "predicted step", "stock", "nominal", "no data-"):
        assert part in text


def test_the_network_between_clusters_is_a_matrix_and_a_flat_one_is_none(capsys):
    assert holmes("--sizes", "pipeline=3", sample="three_links_6") == 0
    table = capsys.readouterr().out.partition("between clusters, one way")[2]
    rows = {
        line.split()[0]: " ".join(line.split())
        for line in table.splitlines()
        if line[:2] in ("a ", "b ", "c ")
    }
    assert rows == {
        "a": "a 200 Mb/s 20 ms 50 Mb/s 20 ms",
        "b": "b 200 Mb/s 20 ms 200 Mb/s 20 ms",
        "c": "c 50 Mb/s 20 ms 200 Mb/s 20 ms",
    }
    assert (
        holmes("--sizes", "pipeline=2") == 0
        and "between clusters, one way" not in capsys.readouterr().out
    )


def test_spanning_exits_1(capsys):
    assert holmes("--pipeline", "2", sample="two_clusters_3_5") == 1
    assert (
        "1 data group spans clusters (one has a0, b4): on ethernet, costs"
        in capsys.readouterr().out.replace("\n", " ")
    )


def test_json_is_the_plan(capsys, tmp_path):
    assert holmes("--pipeline", "2", "--json", "--output", str(tmp_path / "plan.json")) == 0
    printed, written = (
        json.loads(capsys.readouterr().out),
        json.loads((tmp_path / "plan.json").read_text()),
    )
    assert printed.pop("traffic") and printed.keys() == written.keys()
    assert all(printed[key] == written[key] for key in written if key != "digest")
    assert load_plan(tmp_path / "plan.json").nodes == ("a0", "a1", "b0", "b1")


def test_options_override_sizes(capsys):
    assert (
        holmes(
            "--sizes",
            "pipeline=4,tensor=1",
            "--pipeline",
            "2",
            "--order",
            "tp-cp-ep-pp-dp",
            "--json",
        )
        == 0
    )
    sizes = json.loads(capsys.readouterr().out)["sizes"]
    assert (sizes["pipeline"], sizes["data"], sizes["order"]) == (2, 2, "tp-cp-ep-pp-dp")


def test_unknown_sizes(capsys):
    assert holmes() == 0
    assert "nodes: a[0-1],b[0-1]" in capsys.readouterr().out


def test_workload(capsys, tmp_path):
    (tmp_path / "w.toml").write_text(
        "forward_seconds = 1\nbackward_seconds = 2.0\nmicro_batches = 3\ngradient_bytes = 1e6\n"
    )
    assert (
        holmes(
            "--pipeline",
            "2",
            "--workload",
            str(tmp_path / "w.toml"),
            "--micro-batches",
            "4",
            "--activation-bytes",
            "0",
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "nominal" not in text
    assert "predicted step: 15" in text  # (4 + 2 - 1) * 3


@pytest.mark.parametrize(
    "text,message",
    [
        ("forward = 1", "'forward' is not known"),
        ("micro_batches = 1.5", "'micro_batches'"),
        ("x", "not valid TOML"),
    ],
)
def test_bad_workload_file(text, message, tmp_path):
    (tmp_path / "w.toml").write_text(text)
    with pytest.raises(HolmesError, match=message):
        holmes("--pipeline", "2", "--workload", str(tmp_path / "w.toml"))


@pytest.mark.parametrize(
    "arguments,message",
    [
        (("--pipeline", "3"), "does not divide the world size 4"),
        (("--pipeline", "0"), "pipeline is 0"),
        (("--sizes", "pipes=2"), "--sizes: 'pipes' is not known; did you mean 'pipeline'?"),
        (("--order", "dp-tp", "--pipeline", "2"), "lacks pp"),
        (
            ("--pipeline", "2", "--micro-batches", "0"),
            "key 'micro_batches' must be 1 or more, not 0",
        ),
        (
            ("--pipeline", "2", "--forward-seconds", "nan"),
            "key 'forward_s' must be 0 or more, not nan",
        ),
        (("--pipeline", "2", "--output", "/nonexistent/plan.json"), "cannot be written"),
        (("--pipeline", "2", "--workload", "/nonexistent.toml"), "/nonexistent.toml"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(HolmesError, match=message):
        holmes(*arguments)


def test_missing_cluster_file():
    with pytest.raises(HolmesError, match="nowhere.toml: cannot be read"):
        holmes(sample="nowhere")


def test_a_probed_cluster_is_predicted_by_what_was_measured(capsys, tmp_path):
    text = (EXAMPLES / "two_clusters_4.toml").read_text()
    slow = "[link.ethernet]\nring = [[1024, 0.01], [1048576, 10.0], [4194304, 40.0]]\n"
    steps = []
    for name, content in (("stated", text), ("probed", text + slow)):
        (tmp_path / f"{name}.toml").write_text(content)
        parser = argparse.ArgumentParser()
        command.add_parser(parser.add_subparsers())
        args = parser.parse_args(
            ["plan", "--cluster", str(tmp_path / f"{name}.toml"), "--sizes", "pipeline=2", "--json"]
        )
        assert args.run(args) == 0
        steps.append(json.loads(capsys.readouterr().out)["predicted"]["stock_step_seconds"])
    assert steps[1] > 5 * steps[0]


def test_a_cluster_file_that_can_be_read_once_is_enough(capsys):
    """As with `--cluster <(command)`."""
    ours, theirs = os.pipe()
    os.write(theirs, (EXAMPLES / "two_clusters_4.toml").read_bytes())
    os.close(theirs)
    try:
        assert main(["plan", "--cluster", f"/dev/fd/{ours}", "--pipeline", "2"]) == 0
    finally:
        os.close(ours)
    assert "predicted step" in capsys.readouterr().out


INTERLEAVED = (
    "pretrain_gpt.py --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 "
    "--micro-batch-size 1 --global-batch-size 16 --vocab-size 5000 --pipeline-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 2"
).split()


@pytest.mark.parametrize("method", ["balanced", "speed"])
def test_layers_of_interleaved_stages_are_not_partitioned(method):
    """The job refuses such a plan, too: it has as many layers as stages, not as chunks."""
    with pytest.raises(HolmesError, match="2 chunks of layers on each stage"):
        holmes("--pipeline", "2", "--partition", method, "--", *INTERLEAVED)


def test_layers_of_even_chunks_may_be_listed(capsys):
    even = ["--holmes", "--holmes-partition", "2,2,2,2"]
    assert holmes("--search", "--limit", "pipeline=2", "--", *INTERLEAVED, *even) == 0
    assert "P2 V2" in capsys.readouterr().out


def test_layers_of_uneven_chunks_are_not_possible(capsys):
    uneven = ["--holmes", "--holmes-partition", "3,5"]
    assert holmes("--search", "--limit", "pipeline=2", "--", *INTERLEAVED, *uneven) == 0
    assert "not possible: your layout: --holmes-partition: the command has 2 chunks" in (
        capsys.readouterr().out
    )
