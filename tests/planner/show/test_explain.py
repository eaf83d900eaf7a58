"""holmes plan --explain: the table, the JSON, the picture."""

import json
from pathlib import Path

import pytest
from plan_command import holmes

from holmes_ext.errors import HolmesError
from holmes_ext.plan.plan import load_plan

MODELS = Path(__file__).parents[3] / "examples" / "models"
DEMO = str(MODELS / "deepspeed_demo.toml")
SLOW = (
    (MODELS / "deepspeed_demo.toml")
    .read_text()
    .replace("flops = 5e9", "flops = 5e9\nmemory_bytes = 1e8\n[gpu.cluster.b]\nflops = 2.5e9 #")
)


@pytest.fixture
def slow(tmp_path):
    """Write the demo's model for a site where cluster b's GPUs are half as fast."""
    (tmp_path / "slow.toml").write_text(SLOW)
    return str(tmp_path / "slow.toml")


def test_table(capsys, slow):
    assert holmes("--pipeline", "2", "--model", slow, "--explain") == 0
    text = capsys.readouterr().out
    for part in (
        "uniform: predicted step",
        "speed: predicted step",
        "balanced: predicted step",
        "0 a ",
        "of 100 MB",
        "1.000 x uniform",
        "idle",
    ):
        assert part in text, text
    assert "nominal" not in text


def test_json_adds_up(capsys, slow):
    assert holmes("--pipeline", "2", "--model", slow, "--explain", "--json", "--overlap", "on") == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["overlap"]
        and found["memory_limit_bytes"] == [1e8, 1e8]
        and list(found["partitions"]) == ["uniform", "speed", "balanced"]
    )
    for one in found["partitions"].values():
        assert sum(one["layers"]) == 6
        for stage in range(2):
            kinds = "compute_seconds", "exposed_reduction_seconds", "idle_seconds"
            parts = sum(one[kind][stage] for kind in kinds)
            assert (
                parts == pytest.approx(one["step_seconds"]) and one["idle_seconds"][stage] >= -1e-9
            )
            assert one["exposed_reduction_seconds"][stage] < one["reduction_seconds"][stage]
    steps = {name: one["step_seconds"] for name, one in found["partitions"].items()}
    assert steps["balanced"] <= steps["speed"] < steps["uniform"] / 1.1


def test_plan_has_the_stages(capsys, tmp_path, slow):
    assert (
        holmes(
            "--pipeline",
            "2",
            "--model",
            slow,
            "--partition",
            "balanced",
            "--output",
            str(tmp_path / "plan.json"),
        )
        == 0
    )
    assert "layers of the stages (balanced): 4 2" in capsys.readouterr().out
    plan = load_plan(tmp_path / "plan.json")
    assert (plan.stage_layers, plan.partition) == ((4, 2), "balanced")


def test_gpus_of_the_cluster_file_count(capsys, tmp_path):
    """Named in cluster.toml, not in the model: the slower ones get fewer layers, and the memory is theirs."""
    text = (MODELS.parent / "clusters" / "two_clusters_4.toml").read_text()
    own = 'kind = "{0}"\ngpu_flops = {1}\ngpu_memory_bytes = {2}'
    for kind, flops, memory in (("ib", 5e9, 1e8), ("roce", 2.5e9, 2e8)):
        text = text.replace(f'kind = "{kind}"', own.format(kind, flops, memory))
    (tmp_path / "c.toml").write_text(text)
    assert (
        holmes(
            "--pipeline", "2", "--model", DEMO, "--explain", "--json", sample=str(tmp_path / "c")
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["memory_limit_bytes"] == [1e8, 2e8] and found["partitions"]["balanced"][
        "layers"
    ] == [4, 2]


def test_what_does_not_fit_is_marked(capsys, tmp_path):
    """Uniform does not fit stage 0, which keeps two micro-batches; balanced is what does."""
    (tmp_path / "m.toml").write_text(
        SLOW.replace("[gpu.cluster.b]\nflops = 2.5e9", "[gpu.cluster.a]\nmemory_bytes = 4.5e7")
    )
    assert (
        holmes("--pipeline", "2", "--model", str(tmp_path / "m.toml"), "--explain", "--json") == 0
    )
    found = json.loads(capsys.readouterr().out)["partitions"]
    assert found["uniform"]["fits"] == [False, True] and found["balanced"]["fits"] == [True, True]
    holmes("--pipeline", "2", "--model", str(tmp_path / "m.toml"), "--explain")
    assert "does not fit the memory" in capsys.readouterr().out


def test_picture(tmp_path, slow):
    pytest.importorskip("matplotlib")
    assert holmes("--pipeline", "2", "--model", slow, "--picture", str(tmp_path / "x.png")) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG") and (
        tmp_path / "x.png"
    ).stat().st_size > 10_000


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--pipeline", "2", "--explain"), "--explain and --picture need to know the model"),
        (("--model", DEMO, "--explain"), "key 'global_batch' is missing"),
        (("--pipeline", "2", "--model", DEMO, "--gradient-bytes", "1"), "give it or --workload"),
        (("--pipeline", "2", "--model", DEMO, "--explain", "--alpha", "nan"), "alpha is nan"),
        (
            ("--pipeline", "2", "--model", DEMO, "--picture", "/nonexistent/x.png"),
            "cannot be written",
        ),
        (("--pipeline", "2", "--model", DEMO, "--picture", "/tmp/x.nothing"), "cannot be written"),
        (("--pipeline", "2", "--model", "/nonexistent.toml"), "cannot be read"),
        (("--pipeline", "2", "--partition", "speed"), "needs to know the model"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(HolmesError) as error:
        holmes(*arguments)
    assert message in str(error.value) and "\n" not in str(error.value)
