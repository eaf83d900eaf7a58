"""`holmes plan` without sizes, through main().

The tests check the table, JSON, pictures, limits, Ctrl-C and bad input.
"""

import json
import os
import re
import signal
import subprocess
import sys
from math import inf, prod
from pathlib import Path

import pytest

from holmes_ext.cli.main import main
from holmes_ext.plan.plan import check_plan, load_plan
from holmes_ext.planner.show.time_limit import TimeLimit

EXAMPLES = Path(__file__).parents[3] / "examples"
CLUSTER = str(EXAMPLES / "clusters" / "two_clusters_4.toml")
MODEL = str(EXAMPLES / "models" / "deepspeed_demo.toml")
# No search ends by the clock, however busy the machine is.
SEARCH = [
    *("plan", "--cluster", CLUSTER, "--seconds", "600", "--model", MODEL, "--global-batch", "16")
]
GPT = (
    "pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 64 "
    "--micro-batch-size 1 --global-batch-size 16"
).split()


@pytest.fixture(autouse=True)
def output_without_deadline(monkeypatch):
    """Let the output take the time that it needs, also on a busy machine, so that no step is left out."""
    monkeypatch.setattr(TimeLimit, "simulations_end", inf)


def holmes(capsys, *arguments):
    status = main([*arguments])
    return status, capsys.readouterr()


def test_table_and_explanation(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    status, said = holmes(capsys, *SEARCH)
    assert status == 0
    for part in (
        "proven best within the model",
        "where a step's seconds go",
        "computing",
        "x stock",
        "megatron-lm:",
        "--output plan.json",
    ):
        assert part in said.out, part


@pytest.mark.parametrize("width, left_out", [("80", "reduce, closed form, TFLOP/s"), ("130", "")])
def test_a_narrow_terminal_gets_fewer_columns_but_whole_numbers(
    capsys, monkeypatch, width, left_out
):
    monkeypatch.setenv("COLUMNS", width)
    _, said = holmes(capsys, *SEARCH)
    table = said.out.split("T tensor, P pipeline")[0]
    assert (
        "\u2026" not in table
        and "b -> a" in table
        and (f"too narrow for: {left_out};" in table) == bool(left_out)
    )


def test_json_keeps_every_candidate_and_the_plan_loads(capsys, tmp_path):
    status, said = holmes(
        capsys, *SEARCH, "--for", "deepspeed", "--json", "--output", str(tmp_path / "plan.json")
    )
    found = json.loads(said.out)
    assert status == 0 and len(found["candidates"]) == found["counts"]["plans"] > 10
    bounds = [shape["bound_seconds"] for shape in found["not_expanded"]]
    assert bounds and min(bounds) >= found["optimality_gap"]["bound_seconds"]
    first = found["candidates"][0]
    assert first["tokens_per_second"] == pytest.approx(16 * 16 / first["step_seconds"])
    assert (
        first["step_seconds"]
        == first["simulated_seconds"]
        == found["optimality_gap"]["step_seconds"]
    )
    assert sum(found["where"]["holmes"].values()) == pytest.approx(first["step_seconds"])
    assert (
        found["optimality_gap"]["gap"] < 0.05
        and found["plan"]["predicted"]["step_seconds"] == first["step_seconds"]
    )
    plan = load_plan(tmp_path / "plan.json")
    assert plan.sizes.pipeline == first["pipeline"] and plan.sizes.tensor == first["tensor"]
    from holmes_ext.cluster.site import site_from_spec
    from holmes_ext.cluster.spec import load_spec

    assert check_plan(plan, site_from_spec(load_spec(CLUSTER))) is plan


FAR = """version = 2
ethernet = {rate = "25Gb/s"}
cluster = [{name = "a", kind = "ethernet", nodes = ["a[0-3]"], gpu_flops = 1e12},
           {name = "b", kind = "ethernet", nodes = ["b[0-3]"], gpu_flops = 1e12}]
between = [{clusters = ["a", "b"], rate = "1Mb/s", latency = "90ms"}]
"""


def test_a_cluster_that_is_better_left_out(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "250")
    cluster, output = tmp_path / "far.toml", tmp_path / "plan.json"
    cluster.write_text(FAR)
    asked = ["plan", "--cluster", str(cluster), "--for", "megatron-lm", "--seconds", "60"]
    free = [*asked, "--model", MODEL, "--global-batch", "16"]
    status, said = holmes(capsys, *free, "--output", str(output))
    assert status == 0 and "leave out b (4 nodes): a job on a[0-3] takes" in said.out
    assert {row.split()[0] for row in said.out.splitlines() if row.strip()} >= {"all", "1"}
    assert set(load_plan(output).nodes) == {f"a{number}" for number in range(4)}
    _, said = holmes(capsys, *free, "--json")
    found = json.loads(said.out)
    told, best = found["leave_out"], found["candidates"][0]
    assert (
        told["nodes"] == {"b": [f"b{number}" for number in range(4)]}
        and told["nodelist"] == "a[0-3]"
    )
    assert told["step_seconds"] == best["step_seconds"] < told["step_seconds_of_all"]
    assert found["gpus"] == 4 and "--global-batch-size" in told["launch"]["megatron-lm"]["flags"]
    # a command line has sizes for all nodes: its report is of these, and has a line and flags for the fewer
    _, said = holmes(capsys, *asked, "--json", "--", *GPT)
    found = json.loads(said.out)
    assert found["gpus"] == 8 and found["yours"] and found["leave_out"]["nodelist"] == "a[0-3]"
    assert any(line.strip().startswith("megatron-lm: ") for line in found["told"])
    # nodes that are listed are those of a job
    _, said = holmes(capsys, *free, "--nodelist", "a[0-3],b[0-3]", "--json")
    found = json.loads(said.out)
    assert found["gpus"] == 8 and "leave_out" not in found


def test_a_megatron_command_line(capsys):
    status, said = holmes(capsys, "plan", "--cluster", CLUSTER, "--limit", "tensor=1", "--", *GPT)
    assert status == 0 and "best plan" in said.out
    assert "the command line" not in said.err and "optimality_gap" not in said.err
    status, said = holmes(capsys, "plan", "--cluster", CLUSTER, "--", "train.py", "--lr", "1")
    assert status == 2 and "the command line names no model" in said.err


TINY = (
    "pretrain_gpt.py --num-layers 6 --hidden-size 512 --num-attention-heads 8 --seq-length 128 "
    "--micro-batch-size 1 --global-batch-size 16 --bf16 --vocab-size 1000"
).split()


def rows_of(text):
    """Return the first words of the table's rows."""
    lines = text.split("\u2500\n", 1)[1].split("T tensor, P pipeline")[0].splitlines()
    return [line.split() for line in lines if line.strip()]


def test_your_layout_is_the_first_row_beside_the_best(capsys, monkeypatch):
    """Sizes after -- give the same table: seconds in three columns, and the flags to add.

    plan.json is named as no flag.
    """
    monkeypatch.setenv("COLUMNS", "200")
    status, said = holmes(
        capsys,
        "plan",
        "--cluster",
        CLUSTER,
        "--rows",
        "3",
        "--",
        *TINY,
        "--pipeline-model-parallel-size",
        "2",
        "--use-distributed-optimizer",
        "--my-flag",
        "3",
        "--window-size",
        "64",
    )
    assert status == 0
    first, *others = rows_of(said.out)
    assert first[:4] == ["yours", "P2", "D2", "1x8"] and [row[0] for row in others] == [
        "1",
        "2",
        "3",
    ]
    for part in (
        "read: 6 layers",
        "ZeRO 1",
        "not counted: --window-size",
        "not known to holmes",
        "--my-flag",
        "your layout, stock",
        "x your layout as stock runs it",
        "x your layout with holmes",
        f"  --holmes --holmes-cluster {CLUSTER}\n",
        "megatron-lm:",
        "assumed: GPUs of a, b reach",
    ):
        assert part in said.out, part
    assert said.out.index("not counted") < said.out.index("GPUs, 2 clusters")
    assert "--holmes-plan" not in said.out and "deepspeed:" not in said.out


def test_a_command_line_without_sizes_is_data_parallel(capsys):
    _, said = holmes(capsys, "plan", "--cluster", CLUSTER, "--rows", "1", "--", *TINY)
    assert rows_of(said.out)[0][:3] == ["yours", "D4", "1x4"]


def test_flags_of_holmes_in_the_command_are_holmess(capsys):
    _, said = holmes(
        capsys,
        "plan",
        "--cluster",
        CLUSTER,
        "--json",
        "--",
        "torchrun",
        "--nproc-per-node",
        "1",
        *TINY,
        "--holmes",
        "--holmes-sizes",
        "pipeline=2",
        "--holmes-partition",
        "4,2",
    )
    found = json.loads(said.out)
    assert found["yours"]["pipeline"] == 2 and found["yours"]["stage_layers"] == [4, 2]
    assert not [line for line in found["told"] if "not known" in line]
    _, said = holmes(
        capsys,
        "plan",
        "--cluster",
        CLUSTER,
        "--",
        *TINY,
        "--holmes-sizes",
        "pipeline=2",
        "--holmes-partition",
        "4,4",
    )
    assert (
        "not possible: your layout: layers of the stages 4,4: "
        "they must be 2 numbers above 0 whose sum"
    ) in said.out
    status, said = holmes(
        capsys,
        "plan",
        "--cluster",
        CLUSTER,
        "--pipeline",
        "4",
        "--",
        *TINY,
        "--pipeline-model-parallel-size",
        "2",
        "--decoder-first-pipeline-num-layers",
        "2",
        "--num-layers",
        "8",
    )
    assert status == 0 and "P4" in said.out


def test_your_layout_in_json(capsys):
    _, said = holmes(
        capsys,
        "plan",
        "--cluster",
        CLUSTER,
        "--json",
        "--",
        *TINY,
        "--pipeline-model-parallel-size",
        "2",
    )
    found = json.loads(said.out)
    assert any(line.startswith("read: 6 layers") for line in found["told"])
    assert found["yours"]["pipeline"] == 2 and found["yours"]["simulated_seconds"]
    assert sum(found["where"]["yours"].values()) == pytest.approx(found["yours"]["step_seconds"])
    assert found["candidates"][0]["step_seconds"] <= found["yours"]["step_seconds"] * (1 + 1e-9)


def test_a_layout_that_does_not_divide_is_no_dead_end(capsys, tmp_path):
    status, said = holmes(
        capsys, "plan", "--cluster", CLUSTER, "--", *TINY, "--pipeline-model-parallel-size", "3"
    )
    assert status == 0 and "best plan" in said.out
    told = (
        "pipeline 3 x tensor 1 x context 1 does not divide the world size 4; for tensor 1: pipeline 1, 2, "
        "4;"
    )
    assert f"not possible: your layout: {told} or 3 or 6 processes for pipeline 3" in said.out
    eight = tmp_path / "eight.toml"
    eight.write_text(Path(CLUSTER).read_text().replace("processes = 1", "processes = 8"))
    status, said = holmes(
        capsys, "plan", "--cluster", str(eight), "--pipeline", "3", "--tensor", "8", "--", *TINY
    )
    assert (
        status == 2 and "for tensor 8: pipeline 1, 2, 4; or 3 or 6 nodes for pipeline 3" in said.err
    )


def test_given_sizes_keep_the_model_after_the_dashes(capsys, monkeypatch, tmp_path):
    """Given sizes show seconds by cause, memory and flags, without a search.

    plan.json is a flag once it is written.
    """
    monkeypatch.setenv("COLUMNS", "200")
    given = ["plan", "--cluster", CLUSTER, "--pipeline", "2"]
    status, said = holmes(capsys, *given, "--", *TINY)
    assert status == 0 and "nominal" not in said.out and "shapes" not in said.out
    assert [row[0] for row in rows_of(said.out.split("GPUs, 2 clusters")[1])] == ["yours"]
    for part in (
        "where a step's seconds go",
        "your layout, stock",
        "memory of the fullest stage",
        "flags of holmes",
        "megatron-lm: change your command line",
        "add --pipeline-model-parallel-size 2 --overlap-grad-reduce --holmes",
    ):
        assert part in said.out, part
    step = float(said.out.split("predicted step: ")[1].split()[0])
    # one figure, not two
    assert step == pytest.approx(float(said.out.split("\nstep ")[1].split()[0]), rel=1e-3)
    assert "--holmes-plan" not in said.out
    status, said = holmes(capsys, *given, "--output", str(tmp_path / "plan.json"), "--", *TINY)
    assert f"--holmes-plan {tmp_path / 'plan.json'}" in said.out
    assert load_plan(tmp_path / "plan.json").sizes.pipeline == 2
    status, said = holmes(capsys, *given, "--search", "--", *TINY)
    assert status == 0 and "shapes" in said.out and rows_of(said.out)[0][:2] == ["yours", "P2"]


def test_a_model_file_with_a_command_line(capsys):
    status, said = holmes(
        capsys,
        *SEARCH[:-2],
        "--",
        "train.py",
        "--pipeline-model-parallel-size",
        "2",
        "--micro-batch-size",
        "2",
        "--global-batch-size",
        "32",
    )
    assert status == 0 and rows_of(said.out)[0][:4] == ["yours", "P2", "D2", "2x8"]
    assert (
        f"read: the model from {MODEL}, from the command line sizes, micro batch 2, global batch 32"
    ) in said.out


def test_a_layout_that_does_not_fit_is_shown_as_that(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    small = tmp_path / "small.toml"
    memory = 'gpu_flops = 1e12\ngpu_memory_bytes = 2e8\nkind = "'
    small.write_text(Path(CLUSTER).read_text().replace('kind = "', memory))
    status, said = holmes(
        capsys, "plan", "--cluster", str(small), "--", *TINY, "--pipeline-model-parallel-size", "1"
    )
    assert status == 0 and "your layout does not fit: stage 0 needs " in said.out
    assert rows_of(said.out)[0][-1] == "!" and rows_of(said.out)[1][-1] != "!"


def test_limits_take_what_holmes_sizes_takes(capsys):
    status, said = holmes(
        capsys, *SEARCH, "--limit", "pipeline=2,tensor=1,order=tp-cp-ep-dp-pp", "--json"
    )
    shapes = {(one["pipeline"], one["tensor"]) for one in json.loads(said.out)["candidates"]}
    assert status == 0 and shapes == {(2, 1)}
    status, said = holmes(capsys, *SEARCH, "--limit", "pipeline=1,2,order=tp-cp-ep-pp-dp")
    assert (
        status == 2
        and "no arrangement of the clusters is possible, within pipeline=1,2 order=" in said.err
    )


def test_explain_in_ten_lines(capsys):
    """Why the best wins, by cause, and what changes of the site would give, the greatest gain first."""
    own = "--tensor-model-parallel-size", "2"
    status, said = holmes(capsys, "plan", "--cluster", CLUSTER, "--explain", "--", *TINY, *own)
    lines = [
        line
        for line in said.out.splitlines()
        if line.startswith(("against ", "with ", "unchanged "))
    ]
    assert (
        status == 0
        and 4 <= len(lines) <= 10
        and any("your layout as stock runs it" in line for line in lines)
    )
    gains = [float(line.split(": ")[1].split()[0]) for line in lines if line.startswith("with ")]
    assert gains == sorted(gains) and any("twice the rate of" in line for line in lines)


def test_pictures(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    status, _ = holmes(capsys, *SEARCH, "--limit", "tensor=1", "--pictures", str(tmp_path / "p"))
    assert status == 0
    for name in ("placement", "timeline", "ethernet"):
        assert (tmp_path / "p" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "file").write_text("")
    status, said = holmes(capsys, *SEARCH, "--pictures", str(tmp_path / "file"))
    assert status == 2 and said.err.count("\n") == 1 and "cannot be written" in said.err


def test_pictures_without_matplotlib(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, said = holmes(capsys, *SEARCH, "--pictures", str(tmp_path))
    assert (
        status == 2
        and said.err.startswith("holmes: --pictures needs matplotlib")
        and said.err.count("\n") == 1
    )


def test_sizes_given_means_no_search(capsys):
    status, said = holmes(capsys, "plan", "--cluster", CLUSTER, "--model", MODEL, "--pipeline", "2")
    assert status == 0 and "predicted step" in said.out and "shapes" not in said.out


def test_ctrl_c_prints_the_best_so_far():
    code = "import os, signal, sys\nfrom holmes_ext.planner.search.sketch import Sketch\n"
    code += "real = Sketch._add_candidates\n"
    code += (
        "def once(self, *given):\n    real(self, *given)\n    os.kill(os.getpid(), signal.SIGINT)\n"
    )
    code += (
        "Sketch._add_candidates = once\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    )
    code += f"from holmes_ext.cli.main import main\nsys.exit(main({SEARCH!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "COLUMNS": "160"},
    )
    assert done.returncode == 130 and "interrupted: the best so far" in done.stdout, done.stderr[
        -500:
    ]
    assert "Traceback" not in done.stderr, done.stderr[-500:]
    assert signal.SIGINT == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--limit", "tensr=2"], "--limit: 'tensr' is not known; did you mean 'tensor'?"),
        (["--limit", "memory=0.001GB"], "does not fit in GPU memory: nearest is tensor"),
        (["--limit", "tensor=64"], "no parallel sizes are possible: 4 GPUs"),
        (["--global-batch", "0"], "--global-batch is 0; it must be 1 or more"),
        (["--limit", "context=2", "--for", "deepspeed"], "--limit context=2: deepspeed can only 1"),
        (["--for", "deepsped"], "invalid choice: 'deepsped'"),
        (["--rows", "0"], "--rows is 0"),
        (
            ["--limit", "tensor=1", "--limit", "tensor=2"],
            "--limit: tensor is given twice; give it once",
        ),
        (["--globalbatch", "3"], "no option --globalbatch; did you mean '--global-batch'"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    status, said = holmes(capsys, *SEARCH, *arguments)
    assert status == 2 and message in said.err and said.err.count("\n") == 1 and not said.out


def test_the_global_batch_is_asked_for(capsys):
    status, said = holmes(capsys, "plan", "--cluster", CLUSTER, "--model", MODEL)
    assert (
        status == 2
        and "key 'global_batch' is missing; a search needs it, or --global-batch N" in said.err
    )


def test_what_an_stage_link_gains(capsys, monkeypatch, tmp_path):
    """With --inflight off, or the job's own flag, the framework's own schedule is planned.

    plan.json has the same schedule.
    """
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "slow.toml"
    file.write_text(Path(CLUSTER).read_text().replace('rate = "250Mb/s"', 'rate = "20Mb/s"'))
    asked = ["plan", "--cluster", str(file), "--model", MODEL, "--sizes", "pipeline=2"]
    _, said = holmes(capsys, *asked)
    line = next(
        line
        for line in said.out.splitlines()
        if line.startswith("stage links: sends that do not block, ")
    )
    ours, own = re.search(
        r"micro-batches in flight.*: (\S+) s a step instead of (\S+) s under", line
    ).groups()
    assert float(ours) < float(own)
    for off in (["--inflight", "off"], ["--", *GPT, "--holmes-inflight", "off"]):
        _, said = holmes(capsys, *asked, *off)
        assert "stage links:" not in said.out
        _, said = holmes(capsys, *asked, "--json", *off)
        assert json.loads(said.out)["traffic"][0]["in_flight"] == []
    _, said = holmes(capsys, *asked, "--json")
    assert json.loads(said.out)["predicted"]["step_seconds"] == pytest.approx(float(ours), rel=1e-3)


EIGHT = str(EXAMPLES / "clusters" / "two_clusters_8.toml")


def across(framework, *more):
    """Return the command line of a search in which gradients cross."""
    return [
        "plan",
        "--cluster",
        EIGHT,
        "--model",
        MODEL,
        "--global-batch",
        "32",
        "--for",
        framework,
        *more,
        "--limit",
        "clusters=data",
        "--limit",
        "pipeline=2",
        "--json",
    ]


def test_breadth_first_order_is_proposed_where_the_stack_has_it_and_it_is_faster(capsys):
    found = {
        name: json.loads(holmes(capsys, *across(name))[1].out) for name in ("torch", "megatron-lm")
    }
    first, second, *_ = found["torch"]["candidates"]
    assert first["breadth_first"] and not second["breadth_first"]
    assert (
        first["step_seconds"]
        < second["step_seconds"]
        == found["torch"]["optimality_gap"]["step_seconds"]
    )
    assert "LoopedBFS with 3 stages on each rank" in found["torch"]["launch"]["torch"]["script"]
    assert not any(one["breadth_first"] for one in found["megatron-lm"]["candidates"])


def test_breadth_first_order_needs_memory_for_all_its_micro_batches(capsys):
    """69.3 MB in that order; 65 are room for 1F1B's."""
    found = json.loads(holmes(capsys, *across("torch", "--limit", "memory=0.065GB"))[1].out)
    assert not found["candidates"][0]["breadth_first"]
    assert found["launch"]["torch"]["script"].count("Interleaved1F1B") <= 1


def test_flags_of_torchtitan(capsys):
    found = json.loads(holmes(capsys, *across("torchtitan", "--limit", "zero=1"))[1].out)
    flags = found["launch"]["torchtitan"]["flags"]
    given = dict(zip(flags, flags[1:]))
    sizes = [
        int(given[f"--parallelism.{name}_degree"])
        for name in (
            "data_parallel_replicate",
            "data_parallel_shard",
            "pipeline_parallel",
            "tensor_parallel",
            "context_parallel",
        )
    ]
    assert prod(sizes) == 8 and sizes[0] == 2, "two clusters of equal size: a replica in each"
    assert given["--parallelism.pipeline_parallel_schedule"] in (
        "1F1B",
        "Interleaved1F1B",
        "LoopedBFS",
    )


def test_hybrid_shards_of_fsdp2_are_ranked_in_the_flags_and_in_the_table(capsys):
    fsdp2 = across("fsdp2")[:9]
    status, said = holmes(capsys, *fsdp2, "--json")
    found = json.loads(said.out)
    hybrid, flat = (
        min(
            (one for one in found["candidates"] if one["replicas"] == replicas),
            key=lambda one: one["step_seconds"],
        )
        for replicas in (2, 1)
    )
    assert status == 0 and found["candidates"][0] == hybrid
    assert hybrid["step_seconds"] < 0.7 * flat["step_seconds"]
    assert "--holmes-fsdp hybrid" in " ".join(found["launch"]["fsdp2"]["flags"])
    assert "(replicate 2, shard 4)" in found["launch"]["fsdp2"]["script"]
    _, table = holmes(capsys, *fsdp2)
    assert "hybrid" in table.out


def test_stock_ddp_overlaps_as_it_does_by_itself(capsys):
    """So over a quick network little of its all-reduce is left."""
    words = [*across("ddp")[:9], "--limit", "zero=0", "--json"]
    status, said = holmes(capsys, *words)
    exposed = json.loads(said.out)["where"]["stock"]["reduce_across"]
    status, said = holmes(
        capsys, *[word.replace("ddp", "torch") for word in words], "--limit", "pipeline=1"
    )
    assert status == 0 and exposed < 0.95 * json.loads(said.out)["where"]["stock"]["reduce_across"]
