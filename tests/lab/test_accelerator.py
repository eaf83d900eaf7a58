"""lab/emulate/accelerator.py: the emulated time follows the FLOPs.

No number that the program computes changes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import holmes_lab.emulate.accelerator as accelerator
import pytest
import torch
import venvs
import wrapt
from torch import nn
from torch.utils.checkpoint import checkpoint

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.reduce.weight_gradients import WeightGradients

BATCH, SEQUENCE, HIDDEN, LAYERS, WORDS = 2, 8, 16, 3, 11
TOKENS = BATCH * SEQUENCE


class Block(nn.Module):
    """In place on its input on purpose, and with a nested layer that must not be counted twice."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU())

    def forward(self, x):
        return x + self.inner(x)


class Wrapped(Block):
    def __init__(self):
        super().__init__()
        self.nested = Block()

    def forward(self, x, mask=None):
        return self.nested(x), mask


class Embed(nn.Embedding):
    pass


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self):
        self.now, self.slept = 0.0, []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def config(**changes):
    return accelerator.load(accelerator.dump({"flops": 1e6, "classes": ["Block"], **changes}))


@pytest.fixture
def paced():
    """install(config) -> (pacer, clock); undone at the end."""
    undo = []

    def install(settings):
        clock = Clock()
        pacer = accelerator.Pacer(settings, clock, clock.sleep)
        undo.append(pacer.install(nn.Module))
        return pacer, clock

    yield install
    for function in reversed(undo):
        function()


def block_seconds(flops=1e6):
    parameters = HIDDEN * HIDDEN + HIDDEN
    return (2 * parameters * TOKENS + 4 * TOKENS * SEQUENCE * HIDDEN) / flops


def train(recompute):
    """Return loss and gradients of a small model.

    Every layer is recomputed when `recompute` is "reentrant" or "early stop".
    """
    torch.manual_seed(0)
    embed, blocks = Embed(WORDS, HIDDEN), nn.ModuleList(Block() for _ in range(LAYERS))
    head = nn.Linear(HIDDEN, WORDS)
    words = torch.randint(WORDS, (BATCH, SEQUENCE))
    x = embed(words)
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=recompute == "reentrant") if recompute else block(x)
    loss = nn.functional.cross_entropy(head(x).flatten(0, 1), words.flatten())
    loss.backward()
    return [loss.detach()] + [p.grad for m in (embed, blocks, head) for p in m.parameters()]


@pytest.mark.parametrize("recompute", ["", "reentrant", "early stop"])
def test_losses_and_gradients_are_bit_equal_and_the_time_is_the_flops(paced, recompute):
    plain = train(recompute)
    pacer, clock = paced(config())
    for one, two in zip(plain, train(recompute), strict=True):
        assert torch.equal(one, two)
    forwards = 2 if recompute else 1
    assert clock.now == pytest.approx(LAYERS * (forwards + 2) * block_seconds())
    assert pacer.calls == LAYERS * forwards


def test_a_layer_sleeps_once_forward_and_half_and_half_backward(paced):
    _, clock = paced(config())
    x = torch.randn(BATCH, SEQUENCE, HIDDEN, requires_grad=True)
    layer = Block()
    result = layer(x)
    assert clock.slept == pytest.approx([block_seconds()])
    seen = []
    layer.inner[0].weight.register_hook(lambda _: seen.append(clock.now))
    result.sum().backward()
    assert clock.slept[1:] == pytest.approx([block_seconds()] * 2)
    # the gradient is ready in the middle of the backward pass
    assert seen == pytest.approx([2 * block_seconds()])


def test_an_embedding_has_no_input_gradient_and_sleeps_before(paced):
    _, clock = paced(config(classes=[], plain=["Embed"]))
    layer = Embed(WORDS, HIDDEN)
    layer(torch.zeros(BATCH, SEQUENCE, dtype=torch.long)).sum().backward()
    forward = 2 * WORDS * HIDDEN * TOKENS / 1e6
    assert clock.slept == pytest.approx([forward, 2 * forward])


def test_time_that_the_real_compute_takes_is_not_added(paced):
    _, clock = paced(config())
    layer = Block()
    layer.inner[1].register_forward_hook(lambda *_: clock.sleep(0.001))
    layer(torch.randn(BATCH, SEQUENCE, HIDDEN))
    assert clock.now == pytest.approx(block_seconds())


def test_weights_whose_gradients_wait_take_their_part_when_their_turn_comes(paced):
    pacer, clock = paced(config())
    undo, late, layer = pacer.pace_delayed_gradients(WeightGradients), WeightGradients(), Block()
    weights_s = 2 * HIDDEN * HIDDEN * TOKENS / 1e6
    try:
        given = [torch.randn(BATCH, SEQUENCE, HIDDEN, requires_grad=True) for _ in range(2)]
        for micro_batch, one in enumerate(given):
            with late.of(micro_batch):
                result = layer(one)
            result.sum().backward()
        assert clock.now == pytest.approx(2 * (3 * block_seconds() - weights_s))
        late.make(1)
        assert clock.now == pytest.approx(2 * 3 * block_seconds() - weights_s)
        late.make(0)
        assert clock.now == pytest.approx(2 * 3 * block_seconds())
        layer(given[0]).sum().backward()  # all at once
        assert clock.now == pytest.approx(3 * 3 * block_seconds())
    finally:
        undo()
    expected = Block()
    expected.load_state_dict(layer.state_dict())
    for one in (*given, given[0]):
        expected(one.detach().requires_grad_()).sum().backward()
    torch.testing.assert_close(layer.inner[0].weight.grad, expected.inner[0].weight.grad)


def test_nested_layers_and_tuples(paced):
    pacer, clock = paced(config())
    x = torch.randn(BATCH, SEQUENCE, HIDDEN, requires_grad=True)
    Wrapped()((x), mask=torch.ones(1))[0].sum().backward()
    assert pacer.calls == 1
    parameters = 2 * (HIDDEN * HIDDEN + HIDDEN)
    assert clock.now == pytest.approx(
        3 * (2 * parameters * TOKENS + 4 * TOKENS * SEQUENCE * HIDDEN) / 1e6
    )


def test_an_exception_in_a_layer_leaves_the_pacer_usable(paced):
    pacer, clock = paced(config())
    with pytest.raises(RuntimeError):
        Block()(torch.randn(BATCH, SEQUENCE, HIDDEN + 1))
    Block()(torch.randn(BATCH, SEQUENCE, HIDDEN))
    assert pacer.calls == 2


def test_speed_by_cluster_and_layout(monkeypatch):
    pacer = accelerator.Pacer(config(speed={"b": 2.0}))
    sbh = accelerator.Pacer(config(layout="sbh"))
    bare = pacer.seconds(100, (BATCH, SEQUENCE, HIDDEN), has_attention=True)
    assert bare == pytest.approx((2 * 100 * TOKENS + 4 * TOKENS * SEQUENCE * HIDDEN) / 1e6)
    assert sbh.seconds(100, (SEQUENCE, BATCH, HIDDEN), has_attention=True) == pytest.approx(bare)
    assert pacer.seconds(100, (BATCH, SEQUENCE, HIDDEN), has_attention=False) == pytest.approx(
        2 * 100 * TOKENS / 1e6
    )
    monkeypatch.setenv("HOLMES_LAB_CLUSTER", "b")
    assert pacer.seconds(100, (BATCH, SEQUENCE, HIDDEN), has_attention=True) == pytest.approx(
        bare / 2
    )


@pytest.mark.parametrize(
    "document, key",
    [
        ({"classes": ["Block"]}, "'flops' is missing"),
        ({"flops": 0, "classes": ["Block"]}, "'flops'"),
        ({"flops": 1e9}, "'classes' and 'plain'"),
        (
            {"flops": 1e9, "classes": ["Block"], "sped": {}},
            "'sped' is not known; did you mean 'speed'",
        ),
        ({"flops": 1e9, "classes": ["Block"], "speed": {"a": -1}}, "'speed.a'"),
        ({"flops": 1e9, "classes": ["Block"], "layout": "hsb"}, "'layout'"),
        (["Block"], "not a JSON object"),
    ],
)
def test_bad_settings_name_the_key(document, key):
    with pytest.raises(HolmesError, match=f"HOLMES_LAB_ACCELERATOR.*{key}"):
        accelerator.load(json.dumps(document))


def run_python(tmp_path, code, classes):
    """Run a Python without the lab's modules, started as the lab starts it.

    A sitecustomize of the user's still runs.
    """
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['USERS_SITE'] = 'was here'\n")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    env[accelerator.VARIABLE] = accelerator.dump({"flops": 1e12, "classes": classes})
    accelerator.add_to_environment(env)
    assert env[accelerator.MARKER] == "1"
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )


def test_it_installs_itself_in_any_python_and_chains_sitecustomize(tmp_path):
    code = "import os, sys; print(os.environ['USERS_SITE'], 'torch' in sys.modules)"
    code += (
        "\nimport torch; print(torch.nn.Module.__call__.__qualname__); torch.nn.Linear(1, "
        "1)(torch.ones(1, 1, 1))"
    )
    done = run_python(tmp_path, code, ["Linear"])
    assert done.stdout.split() == [
        "was",
        "here",
        "False",
        "Pacer.install.<locals>.emulated_call",
    ], done.stderr
    assert done.stderr == ""


def test_it_installs_itself_in_a_python_that_knows_holmes_only_by_its_place(tmp_path):
    python = venvs.make(tmp_path / "venv")
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "wrapt").symlink_to(Path(wrapt.__file__).parent)
    env = venvs.clean_environ(PYTHONPATH=str(packages))
    code = "import sys, wrapt; print('holmes_lab.emulate.accelerator' in sys.modules)"
    env[accelerator.VARIABLE] = accelerator.dump({"flops": 1e12, "classes": ["Linear"]})
    assert (
        subprocess.run([python, "-c", code], env=env, capture_output=True, text=True).stdout
        == "False\n"
    )
    accelerator.add_to_environment(env)
    done = subprocess.run([python, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_a_misspelt_class_is_reported_at_the_end(tmp_path):
    done = run_python(
        tmp_path, "import torch; torch.nn.Linear(1, 1)(torch.ones(1, 1, 1))", ["Linaer"]
    )
    assert "paced nothing: no layer of class Linaer ran" in done.stderr


def test_the_site_directory_shadows_nothing_but_sitecustomize():
    site = Path(accelerator.__file__).parents[1] / "site"
    assert {path.name for path in site.glob("*.py")} == {"sitecustomize.py", "__init__.py"}
