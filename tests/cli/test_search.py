"""`holmes plan` without sizes: the table, JSON, pictures, limits, Ctrl-C and bad input, each through main()."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holmes_ext.cli.main import main
from holmes_ext.plan.plan import check_plan, load_plan

EXAMPLES = Path(__file__).parents[2] / "examples"
CLUSTER = str(EXAMPLES / "clusters" / "two_clusters_4.toml")
MODEL = str(EXAMPLES / "models" / "deepspeed_demo.toml")
SEARCH = ["plan", "--cluster", CLUSTER, "--model", MODEL, "--global-batch", "16"]
GPT = ("pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1"
       " --global-batch-size 16").split()


def holmes(capsys, *arguments):
    status = main([*arguments])
    return status, capsys.readouterr()


def test_table_and_explanation(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    status, said = holmes(capsys, *SEARCH)
    assert status == 0
    for part in ("proven best within the model", "simulated: best", "where a step's seconds go", "computing", "x stock",
                 "megatron-lm:", "--holmes-plan"):
        assert part in said.out, part


@pytest.mark.parametrize("width, left_out", [("80", "reduce, closed form, TFLOP/s"), ("130", "")])
def test_a_narrow_terminal_gets_fewer_columns_but_whole_numbers(capsys, monkeypatch, width, left_out):
    monkeypatch.setenv("COLUMNS", width)
    _, said = holmes(capsys, *SEARCH)
    table = said.out.split("T tensor, P pipeline")[0]
    assert "\u2026" not in table and "b -> a" in table and (f"too narrow for: {left_out};" in table) == bool(left_out)


def test_json_keeps_every_candidate_and_the_plan_loads(capsys, tmp_path):
    status, said = holmes(capsys, *SEARCH, "--for", "deepspeed", "--json", "--output", str(tmp_path / "plan.json"))
    found = json.loads(said.out)
    assert status == 0 and len(found["candidates"]) == found["counts"]["plans"] > 10
    first = found["candidates"][0]
    assert first["tokens_per_second"] == pytest.approx(16 * 16 / first["step_seconds"])
    assert first["step_seconds"] == first["simulated_seconds"] == found["certificate"]["step_seconds"]
    assert sum(found["where"]["holmes"].values()) == pytest.approx(first["step_seconds"])
    assert found["closed_form"]["proven"] and found["plan"]["predicted"]["step_seconds"] == first["step_seconds"]
    plan = load_plan(tmp_path / "plan.json")
    assert plan.sizes.pipeline == first["pipeline"] and plan.sizes.tensor == first["tensor"]
    from holmes_ext.cluster.site import site_from_spec
    from holmes_ext.cluster.spec import load_spec

    assert check_plan(plan, site_from_spec(load_spec(CLUSTER))) is plan


def test_a_megatron_command_line(capsys):
    status, said = holmes(capsys, "plan", "--cluster", CLUSTER, "--limit", "tensor=1", "--", *GPT)
    assert status == 0 and "best plan" in said.out
    assert "the command line" not in said.err and "certificate" not in said.err
    status, said = holmes(capsys, "plan", "--cluster", CLUSTER, "--", "train.py", "--lr", "1")
    assert status == 2 and "the command line names no model" in said.err


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
    assert status == 2 and said.err.startswith("holmes: --pictures needs matplotlib") and said.err.count("\n") == 1


def test_sizes_given_means_no_search(capsys):
    status, said = holmes(capsys, "plan", "--cluster", CLUSTER, "--model", MODEL, "--pipeline", "2")
    assert status == 0 and "predicted step" in said.out and "shapes" not in said.out


def test_ctrl_c_prints_the_best_so_far():
    code = "import os, signal, sys\nfrom holmes_ext.plan.search import search\nreal = search._Run._work_out\n"
    code += "def once(self, *given):\n    real(self, *given)\n    os.kill(os.getpid(), signal.SIGINT)\n"
    code += "search._Run._work_out = once\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += f"from holmes_ext.cli.main import main\nsys.exit(main({SEARCH!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240,
                          env={**os.environ, "COLUMNS": "160"})
    assert done.returncode == 130 and "interrupted: the best so far" in done.stdout, done.stderr[-500:]
    assert "Traceback" not in done.stderr, done.stderr[-500:]
    assert signal.SIGINT == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--limit", "tensr=2"], "--limit 'tensr=2' is not NAME=VALUE,...; did you mean 'tensor'?"),
        (["--limit", "memory=0.001GB"], "fits nowhere: nearest is tensor"),
        (["--limit", "tensor=64"], "no parallel sizes are possible: 4 GPUs"),
        (["--global-batch", "0"], "--global-batch is 0; it must be 1 or more"),
        (["--limit", "context=2", "--for", "deepspeed"], "--limit context=2: deepspeed can only 1"),
        (["--for", "deepsped"], "invalid choice: 'deepsped'"),
        (["--rows", "0"], "--rows is 0"),
        (["--globalbatch", "3"], "unrecognized arguments"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    status, said = holmes(capsys, *SEARCH, *arguments)
    assert status == 2 and message in said.err and said.err.count("\n") == 1 and not said.out


def test_the_global_batch_is_asked_for(capsys):
    status, said = holmes(capsys, "plan", "--cluster", CLUSTER, "--model", MODEL)
    assert status == 2 and "key 'global_batch' is missing; a search needs it, or --global-batch N" in said.err
