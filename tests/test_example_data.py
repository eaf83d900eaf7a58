"""examples/deepspeed_pipeline: which sample goes where, and the options."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
EXAMPLE = Path(__file__).parent.parent / "examples" / "deepspeed_pipeline"


def load(name):
    """Import a module of the example under a name of its own: `data` and `options` are nobody's packages."""
    spec = importlib.util.spec_from_file_location(
        f"deepspeed_pipeline_{name}", EXAMPLE / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


data, options = load("data"), load("options")
TEXT = torch.arange(
    241, dtype=torch.uint8
)  # windows of 8: 30 of them, each byte says where it lies


def batches(micro_batches=2, data_ranks=2, data_rank=0, rows=3, seed=1, text=TEXT):
    return data.Batches(text, 8, rows, micro_batches, data_ranks, data_rank, seed)


def global_batch(step, micro_batches, data_ranks, **kwargs):
    """Return the samples of a step over all ranks in the order of their numbers."""
    ranks = [
        list(batches(micro_batches, data_ranks, rank, **kwargs).step(step))
        for rank in range(data_ranks)
    ]
    return torch.cat(
        [ranks[rank][micro][0] for micro in range(micro_batches) for rank in range(data_ranks)]
    )


def test_labels_are_the_next_bytes():
    for tokens, labels in batches().step(0):
        assert (
            tokens.shape == labels.shape == (3, 8) and tokens.dtype == labels.dtype == torch.int64
        )
        assert torch.equal(labels, tokens + 1)


def test_the_global_batch_does_not_depend_on_the_number_of_ranks():
    one = global_batch(3, micro_batches=12, data_ranks=1, rows=1)
    assert torch.equal(one, global_batch(3, micro_batches=2, data_ranks=2))
    assert torch.equal(one, global_batch(3, micro_batches=1, data_ranks=4))


def test_an_epoch_visits_every_window_once_and_the_next_in_another_order():
    starts = [int(batches().sample(number)[0][0]) for number in range(60)]
    assert sorted(starts[:30]) == sorted(starts[30:]) == list(range(0, 240, 8))
    assert starts[:30] != starts[30:]


def test_a_step_is_a_function_of_the_seed_alone():
    first, again, other = (global_batch(7, 2, 2, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(first, global_batch(8, 2, 2))


def test_a_text_that_is_too_short_is_named():
    assert batches(text=TEXT[:9]).windows == 1
    with pytest.raises(
        ValueError, match="8 bytes and the byte after it do not fit in the text's 8 bytes"
    ):
        batches(text=TEXT[:8])


def test_the_text_is_english_and_long():
    text = bytes(data.load_text().tolist())
    assert len(text) > 300_000 and text.count(b" the ") > 1000


@pytest.mark.parametrize(
    "world, argv, message",
    [
        ("4", "--stages 3", "a world size of 4 processes is not divisible by --stages 3"),
        ("4", "--stages 4 --layers 2", "--layers 2 are too few for --stages 4"),
        ("1", "--hidden 100 --heads 3", "--hidden 100 is not divisible by --heads 3"),
        ("1", "--steps 0", "argument --steps: 0 is below 1"),
        ("1", "--lr nan", "argument --lr: nan is below 0"),
        ("1", "--layers x", "argument --layers: invalid int value: 'x'"),
        (
            "1",
            "--partition-method speed",
            "--partition-method speed is none of uniform, parameters, type:REGEX",
        ),
        ("1", "--partition-method type:(", "--partition-method type:(: missing )"),
        ("1", "--save-every 2", "--save-every 2 needs --save DIR"),
        (
            "1",
            "--deepspeed_config /nowhere.json",
            "--deepspeed_config /nowhere.json: [Errno 2] No such file",
        ),
        ("1", "--zero 2", "argument --zero: invalid choice: 2"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(monkeypatch, capsys, world, argv, message):
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit) as stop:
        options.parse_args(argv.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and message in error

    monkeypatch.setenv("LOCAL_RANK", "1")  # the node's first process has said it
    with pytest.raises(SystemExit) as stop:
        options.parse_args(argv.split())
    assert stop.value.code == 2 and capsys.readouterr().err == ""


def test_the_deepspeed_config_file_wins(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "1")
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_batch_size": 8, "gradient_clipping": 0.5}))
    plain, _ = options.parse_args(["--micro-batches", "6"])
    config = options.deepspeed_config(plain)
    assert config["gradient_accumulation_steps"] == 6 and config["gradient_clipping"] == 0.0
    changed, _ = options.parse_args(["--deepspeed_config", str(file)])
    config = options.deepspeed_config(changed)
    assert config["gradient_clipping"] == 0.5 and config["train_batch_size"] == 8
    assert (
        "gradient_accumulation_steps" not in config
        and "train_micro_batch_size_per_gpu" not in config
    )
