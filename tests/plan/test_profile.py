"""runtime/measure/profile.py and plan/profile.py.

The tests check how passes are cut at layers, how a profile becomes a partition, and bad input.
"""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import clusters
import pytest

from holmes_ext.cli.main import main
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import load_spec
from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.stages import predict
from holmes_ext.plan.profile import Profile, StageTimes, check_profile, load_profile, measured_costs
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime.measure import profile_file
from holmes_ext.runtime.measure.profiler import WARM_UP, Profiler

CLUSTERS = clusters.toml(
    "a ib 10Gb/s a[0-1]", "b roce 10Gb/s b[0-1]", ethernet="1Gb/s", processes=1
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTERS)
    return path


def stage(cluster, blocks, forward, **more):
    values = dict(
        clusters=(cluster,),
        nodes=(f"{cluster}0", f"{cluster}1"),
        blocks=blocks,
        forward_s=(forward,) * len(blocks),
        backward_s=(2 * forward,) * len(blocks),
        before_s=(0.1, 0.2),
        after_s=(0.3, 0.6),
        reduction_s_per_byte=0.01,
        reduction_latency_s=0.001,
        stage_link_s=0.005,
    )
    return StageTimes(**{**values, **more})


def profile(file, stages=None, **more):
    site = site_from_spec(load_spec(file))
    slow = stages or (stage("a", (0, 1, 2, 3, 4), 1.0), stage("b", (5, 6, 7, 8, 9), 1.5))
    sizes = Sizes(pipeline=2).complete(4)
    values = dict(
        framework="deepspeed",
        site=site.to_dict(),
        sizes=sizes,
        micro_batches=8,
        steps=3,
        gradient_bytes=(4.0, *(8.0,) * 10, 4.0),
        activation_bytes=100.0,
        step_s=200.0,
        stages=slow,
    )
    return Profile(**{**values, **more})


class Ticks:
    """A clock that the test moves."""

    now = 0.0

    def __call__(self):
        return self.now

    def pass_(self, seconds):
        self.now += seconds


def test_a_pass_is_cut_at_the_layers():
    """A pass through an embedding and two linear layers is cut at the layers.

    Time passes inside each layer, and in the modules behind them.
    """
    torch = pytest.importorskip("torch")
    clock = Ticks()

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, forward, backward):
            ctx.seconds = backward
            clock.pass_(forward)
            return x * 1.0

        @staticmethod
        def backward(ctx, gradient):
            clock.pass_(ctx.seconds)
            return gradient, None, None

    class Layer(torch.nn.Module):
        def __init__(self, seconds):
            super().__init__()
            self.weight, self.seconds = torch.nn.Parameter(torch.ones(3)), seconds

        def forward(self, x):
            return Slow.apply(x * self.weight, self.seconds, 2 * self.seconds)

    layers = [Layer(1.0), Layer(2.0), Layer(4.0)]
    recorder = Profiler(2, clock)
    recorder.watch([("before", layers[0]), (0, layers[1]), ("after", layers[2])])
    for _ in range(WARM_UP + 2):
        with recorder.step():
            for _ in range(2):
                x = torch.ones(3)
                with recorder.span("forward"):
                    for layer in layers:
                        x = layer(x)
                    clock.pass_(0.5)  # the loss
                with recorder.span("backward"):
                    clock.pass_(0.25)
                    x.sum().backward()
            with recorder.span("reduce"), recorder.span("send"):  # nested: counts as the outer one
                clock.pass_(3.0)
            clock.pass_(0.125)
    assert recorder.finished
    report = recorder.medians()
    assert dict(map(tuple, report["forward"])) == {"before": 1.0, 0: 2.0, "after": 4.5}
    assert dict(map(tuple, report["backward"])) == {"before": 2.0, 0: 4.0, "after": 8.25}
    assert report["totals"] == pytest.approx(
        {"forward": 15.0, "backward": 28.5, "reduce": 3.0, "idle": 0.125, "step": 46.625}
    )
    json.dumps(report, allow_nan=False)
    recorder.release()
    assert not any(layer._forward_pre_hooks for layer in layers)


def test_of_a_stages_ranks_the_slowest_counts(file):
    current = SimpleNamespace(site=site_from_spec(load_spec(file)))
    current.plan = build_plan(current.site, Sizes(pipeline=2))

    def report(stage, speed):
        blocks = range(2 * stage, 2 * stage + 2)
        ends = [["before", 0.5]] if stage == 0 else [["after", 0.75]]
        return {
            "framework": "x",
            "stage": stage,
            "micro_batches": 4,
            "steps": 3,
            "activation_bytes": 8,
            "stage_link_s": 0.1,
            "reduction": [1e-9, 1e-3],
            "gradient_bytes": [[label, 4.0] for label in (*blocks, ends[0][0])],
            "totals": {"step": 9.0 * speed, "idle": 1.0},
            "forward": ends + [[block, speed] for block in blocks],
            "backward": ends + [[block, 2 * speed] for block in blocks],
        }

    found = profile_file.merge(
        current, [report(0, 1.0), report(0, 1.25), report(1, 2.0), report(1, 1.5)]
    )
    assert [one.forward_s for one in found.stages] == [
        (1.25, 1.25),
        (2.0, 2.0),
    ] and found.step_s == 18.0
    assert [one.clusters for one in found.stages] == [
        (current.site.node_by_name[current.plan.node_of(rank)].cluster,) for rank in (0, 2)
    ]
    assert (
        found.blocks == 4
        and found.stages[0].before_s == (0.5, 0.5)
        and found.stages[1].after_s == (0.75, 0.75)
    )


def test_slower_gpus_get_fewer_layers_without_a_number_from_anyone(file, tmp_path):
    profile(file).save(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json").to_json() == profile(file).to_json()
    plan = build_plan(
        site_from_spec(load_spec(file)),
        partition="balanced",
        profile=load_profile(tmp_path / "p.json"),
    )
    assert plan.stage_layers == (6, 4) and plan.sizes.pipeline == 2


def test_measured_costs_are_what_was_measured(file):
    costs = measured_costs(profile(file), [["a"], ["b"]])
    assert costs.forward_s[0] == pytest.approx((0.1, *(1.0,) * 10, 0.3 / 1.5)) and costs.forward_s[
        1
    ] == pytest.approx((0.15, *(1.5,) * 10, 0.3))
    assert (
        costs.reduction_s[0] == pytest.approx((0.04, *(0.08,) * 10, 0.04))
        and costs.transfer_s[0][3] == 0.005
    )
    turned = measured_costs(profile(file), [["b"], ["a"]])  # the same stages in another order
    assert turned.forward_s[0][5] == 1.5 and turned.forward_s[1][5] == 1.0
    with pytest.raises(HolmesError, match="no stage was measured on cluster c"):
        measured_costs(profile(file), [["a"], ["c"]])


def test_layers_of_other_kinds_keep_their_own_times(file):
    """Every second layer twice as large, on the stages a different one first."""
    first = stage(
        "a",
        (0, 1, 2, 3, 4),
        1.0,
        forward_s=(1.0, 2.0, 1.0, 2.0, 1.0),
        backward_s=(2.0, 4.0, 2.0, 4.0, 2.0),
    )
    second = stage(
        "b",
        (5, 6, 7, 8, 9),
        1.0,
        forward_s=(3.0, 1.5, 3.0, 1.5, 3.0),
        backward_s=(6.0, 3.0, 6.0, 3.0, 6.0),
    )
    made = profile(file, (first, second), gradient_bytes=(4.0, *(8.0, 16.0) * 5, 4.0))
    assert measured_costs(made, [["a"], ["b"]]).forward_s[0][1:11] == pytest.approx((1.0, 2.0) * 5)
    assert measured_costs(made, [["a"], ["b"]]).backward_s[1][1:11] == pytest.approx((3.0, 6.0) * 5)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["forward_s", "stage_link_s", "reduction_s_per_byte"])
def test_bad_times_are_named(file, name, value):
    bad = (value,) * 5 if name == "forward_s" else value
    with pytest.raises(HolmesError, match=f"key '{name}' must be"):
        profile(
            file,
            (stage("a", (0, 1, 2, 3, 4), 1.0), stage("b", (5, 6, 7, 8, 9), 1.0, **{name: bad})),
        )


def test_bad_files_are_one_line_and_status_2(file, tmp_path, capsys):
    path = tmp_path / "p.json"
    profile(file).save(path)
    document = json.loads(path.read_text())
    changes = {
        "negative": (
            lambda d: d["stages"][0].update(stage_link_s=-1.0),
            r"key 'stages\[0\].stage_link_s' must be 0 or more, not -1.0",
        ),
        "not a number": (
            lambda d: d["stages"][0]["forward_s"].__setitem__(0, math.nan),
            "NaN is no number of JSON",
        ),
        "edited": (lambda d: d.update(step_s=1.0), "key 'digest' does not match"),
        "version": (lambda d: d.update(version=2), "key 'version' is 2"),
        "cut": (lambda d: d.pop("stages"), "key .stages. is missing"),
        "text": (lambda d: d["stages"][0].update(stage_link_s="x"), "is not a number"),
    }
    for name, (change, message) in changes.items():
        changed = json.loads(json.dumps(document))
        change(changed)
        path.write_text(json.dumps(changed))
        assert main(["plan", "--cluster", str(file), "--profile", str(path)]) == 2, name
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and __import__("re").search(message, said), (name, said)


def test_another_model_or_cluster(file, tmp_path, capsys):
    made = profile(file)
    site = site_from_spec(load_spec(file))
    file.write_text(CLUSTERS.replace("10Gb/s", "5Gb/s"))
    with pytest.raises(HolmesError, match="key 'site_digest': measured on other clusters"):
        check_profile(made, site_from_spec(load_spec(file)))
    model = Model(10, 16, 2, 8, 32, micro_batches=8)
    with pytest.raises(
        HolmesError, match="profile of another model: a layer's gradients are 8 bytes"
    ):
        check_profile(made, site, model=model)
    with pytest.raises(HolmesError, match="profile of another model: 10 layers, but model has 12"):
        check_profile(made, site, model=replace(model, layers=12))
    with pytest.raises(HolmesError, match="key 'sizes': measured with pipeline 2"):
        check_profile(made, site, Sizes(pipeline=4))
    check_profile(
        replace(made, gradient_bytes=(4.0, *(model.costs()[1].parameters * 4,) * 10, 4.0)),
        site,
        Sizes(pipeline=2),
        model,
    )


def test_plan_and_explain_from_a_profile(file, tmp_path, capsys):
    path = tmp_path / "p.json"
    profile(file).save(path)
    assert (
        main(
            [
                "plan",
                "--cluster",
                str(file),
                "--profile",
                str(path),
                "--partition",
                "balanced",
                "--output",
                str(tmp_path / "plan.json"),
            ]
        )
        == 0
    )
    assert "layers of the stages (balanced): 6 4" in capsys.readouterr().out
    assert (
        main(["plan", "--cluster", str(file), "--profile", str(path), "--explain", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)["partitions"]
    assert found["balanced"]["step_seconds"] < found["uniform"]["step_seconds"]
    costs = measured_costs(load_profile(path), [["a"], ["b"]], overlap=True)
    assert found["uniform"]["step_seconds"] == pytest.approx(predict(costs, (5, 5)).step_s)


@pytest.mark.parametrize("text", ["0", "-1", "x", "3.5", "9999999", ",p.json"])
def test_the_option_is_checked(text):
    with pytest.raises(HolmesError, match="--holmes-profile"):
        Options(profile=text)


def test_the_option():
    assert (
        Options().profile_steps,
        Options(profile="3").profile_steps,
        Options(profile="3").profile_file,
    ) == (0, 3, "profile.json")
    stops = Options(profile="3,/x/p.json,stop")
    assert (
        stops.profile_steps,
        stops.profile_file,
        stops.profile_stops,
        Options(profile="3,p").profile_stops,
    ) == (3, "/x/p.json", True, False)


def test_tune_says_what_is_wrong(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command, status, message in (
        ([], 2, "no command"),
        (["--", "no-such-command"], 2, "no such command"),
        (["--", "true"], 2, "ended without writing"),
        (["--", "false"], 1, "ended with status 1"),
        (["--steps", "0", "--", "true"], 2, "--steps 0"),
    ):
        assert main(["tune", *command]) == status
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1, said


def test_the_interleaved_schedule_is_refused(monkeypatch):
    """The interleaved schedule, with several model chunks for each stage, is an error with --holmes-profile.

    The flag measures the time of each layer in training. In evaluation (forward_only) it does nothing.
    """
    from holmes_ext.patches.megatron import profile as megatron_profile
    from holmes_ext.runtime import session

    # As in a job with --holmes-profile.
    monkeypatch.setattr(session, "_active", SimpleNamespace(options=Options(profile="2")))

    # Stands for megatron-core's schedule, which holmes wraps with megatron_profile._schedule.
    def schedule(*, model, num_microbatches, seq_length, micro_batch_size, forward_only=False):
        return "ran"

    two_chunks = ["chunk 0", "chunk 1"]  # as in the interleaved schedule
    # A wrapper gets the wrapped function, no instance, and the positional and keyword arguments.
    arguments = {"model": two_chunks, "num_microbatches": 4, "seq_length": 8, "micro_batch_size": 1}
    with pytest.raises(
        HolmesError, match="--holmes-profile: the interleaved schedule is not measured"
    ):
        megatron_profile._schedule(schedule, None, (), arguments)
    assert (
        megatron_profile._schedule(schedule, None, (), {**arguments, "forward_only": True}) == "ran"
    )
