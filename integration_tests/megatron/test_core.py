"""Tests megatron-core on two emulated clusters, with and without holmes.

A split is a way to divide model and batch over four ranks, such as "tensor 2 pipeline 2". For each split:

    losses     equal those without holmes
    traffic    stays inside a cluster unless it has to leave it

One launch of the processes trains several splits, because the start takes most of the time. Each test runs
with a few splits ("some splits"). With all splits it runs only in some test runs, because it is slow.
"""

import json
import re
from dataclasses import replace

import pytest
from carriers import ON_GPUS, PHYSICAL, gloo_only, gpu_only
from packaging.version import Version

from holmes_ext.cluster.site import site_from_spec
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from integration_tests.jobs import (
    ONE_AT_A_TIME,
    SCRIPTS,
    WAITS,
    fast,
    full,
    megatron_core,
    over_nccl,
    some,
    train_megatron,
)

INSTALLED = megatron_core()
#: Every split trains the same global batches: 16 samples a step.
SPLITS = {
    "pipeline 2": "--pipeline 2 --micro-batches 4 --steps 4",
    "tensor 2 pipeline 2": "--tensor 2 --pipeline 2 --micro-batches 8 --steps 3",
    "pipeline 4": "--pipeline 4 --micro-batches 8 --steps 3",
    "interleaved": "--pipeline 2 --virtual-pipeline 2 --micro-batches 4 --steps 3",
    "overlap": "--pipeline 2 --overlap --micro-batches 4 --steps 3",
    "distributed optimizer, both overlaps, interleaved": (
        "--pipeline 2 --virtual-pipeline 2 --distributed-optimizer --overlap --micro-batches "
        "4 --steps 4"
    ),
    "distributed optimizer": "--pipeline 2 --distributed-optimizer --micro-batches 4 --steps 2 --save "
    "{results}/saved",
    "resumed with other stages": (
        "--pipeline 4 --layout Ett|t|t|L --distributed-optimizer --micro-batches 8 --steps 4 "
        "--load {results}/saved"
    ),
    "context 2": "--pipeline 2 --context 2 --micro-batches 8 --steps 3",
    "interleaved, each cluster an optimizer instance": (
        "--pipeline 2 --virtual-pipeline 2 --distributed-optimizer --instances 2 --order "
        "tp-cp-ep-pp-dp --micro-batches 4 --steps 3"
    ),
}
#: Splits over NCCL on emulated GPUs: the first two of these in the case "some splits", else all. There are
#: few because a communicator takes 100 MB of memory in each rank, and megatron-core never ends one: 900 MB a
#: split.
OVER_NCCL = "pipeline 2", "tensor 2 pipeline 2", "overlap", "distributed optimizer"
#: Splits of the case "all splits" alone: other splits combine what each of these has by itself.
LONGER = "pipeline 4", "context 2", "interleaved, each cluster an optimizer instance"
#: Other models, whose losses are stock's but not the others'.
OTHERS = {
    "experts": "--layers 2 --pipeline 2 --experts 4 --expert 2 --micro-batches 4 --steps 3",
    "experts, distributed optimizer": (
        "--layers 2 --experts 4 --expert 2 --distributed-optimizer --micro-batches 2 --steps 3"
    ),
    "wide": "--hidden 128 --pipeline 2 --distributed-optimizer --micro-batches 4 --steps 2 --save "
    "{results}/wide",
    "wide, resumed": (
        "--hidden 128 --pipeline 4 --distributed-optimizer --micro-batches 8 --steps 4 "
        "--load {results}/wide"
    ),
}
HEAVY = {
    "interleaved inside clusters": (
        "--pipeline 2 --virtual-pipeline 2 --order tp-cp-ep-pp-dp --micro-batches 4 --steps 3"
    ),
    "data 4": "--micro-batches 2 --steps 3",
    "data 4, instances": "--distributed-optimizer --instances 2 --micro-batches 2 --steps 3",
    "tied": "--pipeline 2 --tied --micro-batches 4 --steps 3",
    "uneven": "--pipeline 2 --layout Et|tttL --micro-batches 4 --steps 3",
    "pipeline outside data": "--pipeline 2 --order tp-cp-ep-pp-dp --micro-batches 4 --steps 3",
    "tensor 2 data 2": "--tensor 2 --distributed-optimizer --overlap --micro-batches 4 --steps 3",
    "bf16": "--pipeline 2 --tensor 2 --dtype bf16 --distributed-optimizer --micro-batches 8 --steps 3",
    "pipeline 4 interleaved": "--layers 8 --pipeline 4 --virtual-pipeline 2 --micro-batches 8 --steps 3",
    "tied, distributed optimizer": "--pipeline 2 --tied --distributed-optimizer --micro-batches 4 --steps 3",
    "tied, whole": "--pipeline 2 --tied --micro-batches 4 --steps 2 --save {results}/tied",
    "tied, resumed uneven": "--pipeline 2 --tied --layout Ettt|tL --micro-batches 4 --steps 4 --load "
    "{results}/tied",
}


ALL_SPLITS = pytest.param(True, id="all splits", marks=full(together="all splits of megatron-core"))


@pytest.fixture(scope="module", params=[pytest.param(False, id="some splits"), ALL_SPLITS])
def splits(request):
    """Return the splits to train: name -> flags of the training script.

    A split is a way to divide the model over the ranks. Splits that need a newer megatron-core than the
    installed one are left out.
    """
    is_exhaustive = request.param  # False for "some splits", True for "all splits"
    if ON_GPUS:
        # NCCL's communicators take much memory, so there are few splits.
        names = OVER_NCCL if is_exhaustive else OVER_NCCL[:2]
        wanted = {name: SPLITS[name] for name in names}
    elif is_exhaustive:
        wanted = SPLITS | HEAVY
    else:
        # The splits in LONGER are left out: other splits have their parts, too.
        wanted = {name: flags for name, flags in SPLITS.items() if name not in LONGER}

    unsupported = []
    if INSTALLED < Version("0.15"):  # has no checkpoints that other splits can load
        unsupported += ["--save", "--load"]
    if INSTALLED < Version("0.14"):  # pins memory for context parallelism, which needs a GPU
        unsupported += ["--context"]
    if INSTALLED < Version(
        "0.13"
    ):  # has no layouts, and needs Transformer Engine for this optimizer
        unsupported += ["--layout", "--distributed-optimizer"]
    return {
        name: flags
        for name, flags in wanted.items()
        if not any(flag in flags for flag in unsupported)
    }


@pytest.fixture(scope="module")
def both(two_clusters, splits, tmp_path_factory):
    """Train all splits without holmes and with holmes, and return the two results of train_megatron()."""
    return tuple(
        train_megatron(two_clusters, tmp_path_factory.mktemp(name), splits, *flags)
        for name, flags in (("stock", ()), ("holmes", two_clusters.holmes))
    )


def assert_stocks(stock, holmes, names):
    """Assert that losses and gradient norms of the named splits are equal without and with holmes."""
    for name in names:
        for one, other in zip(stock[name]["entries"], holmes[name]["entries"], strict=True):
            assert abs(one["loss"] - other["loss"]) <= 1e-6, (name, one, other)
            assert abs(one["grad_norm"] - other["grad_norm"]) <= 2e-6, (name, one, other)


def losses_of(split):
    return [entry["loss"] for entry in split["entries"]]


@pytest.mark.row("megatron-core")
@over_nccl
def test_losses_and_gradient_norms_are_stocks_under_every_split(both, splits):
    assert_stocks(both[0][0], both[1][0], splits)


@over_nccl
def test_the_split_does_not_change_what_is_learned(both):
    """The example's initial weights do not depend on the split, and a checkpoint is resumed where it was
    left.
    """
    for done in (both[0][0], both[1][0]):
        reference = {entry["step"]: entry for entry in done["pipeline 2"]["entries"]}
        for name in SPLITS.keys() & done.keys():
            for entry in done[name]["entries"]:
                assert abs(entry["loss"] - reference[entry["step"]]["loss"]) <= 5e-6, (name, entry)
                assert abs(entry["grad_norm"] - reference[entry["step"]]["grad_norm"]) <= 5e-6, (
                    name,
                    entry,
                )
        if "resumed with other stages" in done:
            assert [entry["step"] for entry in done["resumed with other stages"]["entries"]] == [
                3,
                4,
            ]


@gpu_only
@pytest.mark.parametrize(
    "how", some(["synchronize", *ONE_AT_A_TIME], "CUDA_DEVICE_MAX_CONNECTIONS")
)
@over_nccl
def test_messages_that_come_early_hold_nothing_up(two_clusters, both, tmp_path, how):
    """Where the host waits for the device in each layer, where all streams share one hardware queue, and
    where each launch is waited for.
    """
    through = (WAITS, how) if how == "synchronize" else ()
    wanted = {name: SPLITS[name] for name in ("pipeline 2", "tensor 2 pipeline 2")}
    done, _, said = train_megatron(
        two_clusters,
        tmp_path,
        wanted,
        *two_clusters.holmes,
        through=through,
        **ONE_AT_A_TIME.get(how, {}),
    )
    assert "megatron-stage-links" in said or PHYSICAL  # which is said of what is imported before
    assert_stocks(both[0][0], done, wanted)


@full
@pytest.mark.skipif(INSTALLED < Version("0.14"), reason="its sends are no class's")
def test_more_micro_batches_in_flight_learn_the_same(two_clusters, both, tmp_path):
    """With two micro-batches more in flight than 1F1B has, losses and gradient norms do not change."""
    stock = both[0][0]  # name of a split -> its results without holmes
    wanted = {name: SPLITS[name] for name in ("pipeline 2", "pipeline 4") if name in stock}
    results, _, messages = train_megatron(
        two_clusters, tmp_path, wanted, *two_clusters.holmes, "--holmes-inflight", "2"
    )
    # Holmes says that it receives messages between stages early, which the flag needs.
    assert "megatron-stage-links" in messages or PHYSICAL
    assert_stocks(stock, results, wanted)


def test_every_layer_is_built_once(both):
    for name, split in both[1][0].items():
        layers = [number for numbers in split["layers"].values() for number in numbers]
        assert len(set(layers)) == max(layers), (name, split["layers"])
        assert len({layers.count(number) for number in layers}) == 1, (name, split["layers"])


def test_every_stage_that_is_waited_for_reduces_in_buckets(both):
    """Both stages' reductions are exposed on these fabrics: the later one too overlaps, which megatron-core
    does not do by itself.
    """
    stock, holmes = both[0][0], both[1][0]
    assert stock["pipeline 2"]["buckets"] == {str(rank): [0] for rank in range(4)}
    assert all(count > 2 for (count,) in holmes["pipeline 2"]["buckets"].values()), holmes[
        "pipeline 2"
    ]
    if "overlap" in stock:  # not among the few splits that run over NCCL
        assert stock["overlap"]["buckets"]["2"] == [1]
        assert holmes["overlap"]["buckets"]["2"][0] > 2
    # Nothing is reduced with four stages; a distributed optimizer's buckets stay unless the user says
    # --holmes-overlap on: checkpoints may depend on them.
    for own in {"pipeline 4", "distributed optimizer"} & stock.keys():
        assert holmes[own]["buckets"] == stock[own]["buckets"]


@full
@gloo_only  # stock cannot resume its distributed optimizer on a GPU without Apex or Transformer Engine
def test_the_distributed_optimizer_and_experts_overlap_when_told_to(two_clusters, tmp_path):
    """--holmes-overlap on: the same losses, also of a resumed job, with buckets that need no padding and
    weights gathered under way.
    """
    distributed = {
        name: flags for name, flags in SPLITS.items() if "--distributed-optimizer" in flags
    }
    done = []
    for name, more in (("stock", ()), ("holmes", (*two_clusters.holmes, "--holmes-overlap", "on"))):
        (tmp_path / name).mkdir()
        done.append(train_megatron(two_clusters, tmp_path / name, distributed | OTHERS, *more)[0])
    stock, holmes = done
    assert_stocks(stock, holmes, distributed | OTHERS)
    narrow = holmes["distributed optimizer"]["buckets"]
    # padded buckets would be saved wrong; a later stage of narrow layers has no others
    if INSTALLED < Version("0.20"):
        assert narrow == {"0": [3], "1": [3], "2": [1], "3": [1]}
    else:
        assert all(count > 3 for (count,) in narrow.values()), narrow
    assert all(count > 3 for (count,) in holmes["wide"]["buckets"].values()), holmes["wide"]
    assert not any(stock["wide"]["gathers"].values()) and all(holmes["wide"]["gathers"].values())


@over_nccl
def test_gradients_leave_ethernet(both):
    """Stock sends all over Ethernet; under holmes what need not cross clusters does not."""
    for node, nics in both[0][1].items():
        under_holmes = both[1][1][node]
        assert fast(nics) < 0.1 and under_holmes["eth0"] < 0.6 * nics["eth0"], (
            node,
            nics,
            under_holmes,
        )
        assert fast(under_holmes) > 0.4 * nics["eth0"], (node, nics, under_holmes)


@full
def test_a_pair_of_stages_inside_a_cluster_uses_its_fabric(two_clusters, tmp_path):
    """Batched (plain) and unbatched (interleaved) p2p, pipeline 4: a0-a1 and b0-b1 on their fabrics, a1-b0 on
    Ethernet.
    """
    steps, micro_batches, hidden = 3, 8, 128
    split = (
        f"--layers 8 --hidden {hidden} --pipeline 4 --micro-batches {micro_batches} --steps {steps}"
    )
    # Two stages inside a cluster, unbatched: megatron-core would send one direction over the world group, on
    # Ethernet.
    inside = "--pipeline 2 --virtual-pipeline 2 --order tp-cp-ep-pp-dp --micro-batches 4 --steps 2"
    plans = {
        "batched": {"chain": split},
        "unbatched": {"chain": f"{split} --virtual-pipeline 2", "inside": inside},
    }
    losses = {}
    for name, splits in plans.items():
        place = tmp_path / name
        place.mkdir()
        done, sent, output = train_megatron(
            two_clusters, place, splits, *two_clusters.holmes, HOLMES_VERBOSE="on"
        )
        # MB of a chunk's output, one way: rows x sequence x hidden x 4 bytes
        activations = steps * micro_batches * 2 * 32 * hidden * 4 / 1e6
        stage_links = name == "batched" and INSTALLED >= Version("0.14")
        group = (
            "pipeline activations" if stage_links else "pipeline pair"
        )  # of hidden stage links; interleaved: p2p's
        backend = "nccl" if ON_GPUS else "gloo"
        assert re.search(rf"group {group} \[0,1\] {backend}: \S+ via ib0", output)
        assert re.search(rf"{group} \[2,3\] {backend}: \S+ via roce0", output)
        for node in ("a0", "b1"):  # the ends of a plain pipeline: one neighbour, inside the cluster
            assert fast(sent[node]) > activations, (name, node, sent[node])
            if name == "batched":
                assert sent[node]["eth0"] < 0.5 * activations, (name, node, sent[node])
        losses[name] = losses_of(done["chain"])
    assert losses["batched"] == pytest.approx(losses["unbatched"], abs=1e-6)
    assert re.search(rf"group pipeline twin \[0,1\] {backend}: \S+ via ib0", output)
    assert re.search(rf"twin \[2,3\] {backend}: \S+ via roce0", output)


def plan_of(two_clusters, directory, stage_layers):
    plan = build_plan(site_from_spec(two_clusters.spec), Sizes(pipeline=2))
    replace(plan, stage_layers=stage_layers, partition="speed").save(directory / "plan.json")
    return *two_clusters.holmes, "--holmes-plan", str(directory / "plan.json")


def test_layers_of_the_plan_are_built(two_clusters, tmp_path, both):
    """Uneven, with each way to recompute, interleaved and uneven with a chunk that has no layer at all, and a
    layout of the user's own, which wins.
    """
    flags = plan_of(two_clusters, tmp_path, (3, 1))
    recomputed = [
        f"--recompute {way}"
        for way in ("selective", "uniform", "block", "block --recompute-layers 2")
    ]
    more = {"planned": "", **{name: name for name in recomputed}}
    if INSTALLED >= Version("0.13"):
        more["own"] = "--layout Et|tttL"
    plain = {
        name: f"--pipeline 2 --micro-batches 4 --steps 2 {text}" for name, text in more.items()
    }
    done, _, output = train_megatron(two_clusters, tmp_path, plain, *flags)
    for name in ("planned", *recomputed):
        assert done[name]["layers"] == {"0": [1, 2, 3], "1": [1, 2, 3], "2": [4], "3": [4]}, name
        for one, stock in zip(done[name]["entries"], both[0][0]["pipeline 2"]["entries"]):
            assert abs(one["loss"] - stock["loss"]) <= 5e-6, (name, one, stock)
            assert abs(one["grad_norm"] - stock["grad_norm"]) <= 5e-6, (name, one, stock)
    flags = plan_of(two_clusters, tmp_path, (1, 2, 0, 1))
    interleaved = {"interleaved": "--pipeline 2 --virtual-pipeline 2 --micro-batches 4 --steps 2"}
    # no layout: the first and the last stage alone can have layers of their own
    if INSTALLED < Version("0.13"):
        _, _, output = train_megatron(two_clusters, tmp_path, interleaved, *flags, returncode=2)
        assert (
            output.count("lets only the first and the last stage have layers of their own") == 1
        ), output
        assert "Traceback" not in output
        return
    assert done["own"]["layers"] == {"0": [1], "1": [1], "2": [2, 3, 4], "3": [2, 3, 4]}
    assert "your own (Et|tttL) wins over the plan's (3+1)" in output
    assert losses_of(done["planned"]) == pytest.approx(losses_of(done["own"]), abs=1e-6)
    done |= train_megatron(two_clusters, tmp_path, interleaved, *flags)[0]
    assert done["interleaved"]["layers"] == {"0": [1], "1": [1], "2": [2, 3, 4], "3": [2, 3, 4]}
    assert losses_of(done["interleaved"]) == pytest.approx(losses_of(done["own"]), abs=1e-6)


TWO_STAGES = "--pipeline 2 --micro-batches 4 --steps 1"
OF_ANOTHER_JOB = [
    pytest.param(
        (2, 2),
        "--pipeline 4 --micro-batches 8 --steps 1",
        "'sizes'.*pipeline=2.*pipeline=4",
        id="sizes",
        marks=full,
    ),
    pytest.param((3, 2), TWO_STAGES, "'stage_layers'.* 5 layers.*model has 4", id="layers"),
    pytest.param(
        (1, 1, 1, 1),
        TWO_STAGES,
        "'stage_layers' has 4 .*pipeline 2 x virtual pipeline 1",
        id="stages",
        marks=full,
    ),
    pytest.param(
        (2, 2),
        f"{TWO_STAGES} --order tp-cp-ep-dp-xx",
        "order 'tp-cp-ep-dp-xx'.*tp, cp, ep, dp, pp",
        id="order",
    ),
]


@pytest.mark.parametrize("layers, split, expected", OF_ANOTHER_JOB)
def test_a_plan_for_another_job_is_one_line(two_clusters, tmp_path, layers, split, expected):
    flags = plan_of(two_clusters, tmp_path, layers)
    _, _, output = train_megatron(two_clusters, tmp_path, {"split": split}, *flags, returncode=2)
    assert len(re.findall(expected, output)) == 1 and "Traceback" not in output, output


@pytest.mark.skipif(
    INSTALLED < Version("0.13"), reason="its writer of checkpoints does not fit torch 2.13 (stock)"
)
@full
def test_a_checkpoint_of_another_model_is_one_line(two_clusters, tmp_path):
    """The example's own check: a line from each node that comes to it before the launcher ends all."""
    splits = {
        "saved": "--pipeline 2 --micro-batches 4 --steps 1 --save {results}/saved",
        "another": "--hidden 64 --pipeline 2 --micro-batches 4 --steps 2 --load {results}/saved",
    }
    done, _, output = train_megatron(
        two_clusters, tmp_path, splits, *two_clusters.holmes, returncode=2
    )
    assert list(done) == ["saved"] and "Traceback" not in output, output
    assert "saved with hidden 32, but this job has hidden 64" in output, output


#: Arguments of initialize_model_parallel on 4 ranks, and what is told of them.
REFUSED = [
    ({"order": "tp-cp-ep-dp-xx"}, "order 'tp-cp-ep-dp-xx': .*tp, cp, ep, dp, pp"),
    ({"order": "tp-dp", "pipeline_model_parallel_size": 2}, "order 'tp-dp' lacks pp"),
    ({"pipeline_model_parallel_size": 3}, "pipeline 3 x tensor 1 x context 1 .*world size 4"),
    (
        {"tensor_model_parallel_size": 2, "context_parallel_size": 4},
        "pipeline 1 x tensor 2 x context 4 .*world size 4",
    ),
    ({"expert_model_parallel_size": 3}, "expert size 3 .*data 4"),
    (
        {"virtual_pipeline_model_parallel_size": 2},
        "virtual_pipeline_model_parallel_size is 2.*pipeline_model_parallel_size 2",
    ),
    (
        {"num_distributed_optimizer_instances": 3},
        "num_distributed_optimizer_instances is 3.*data 4",
    ),
]


def test_bad_sizes_are_refused_before_any_group_is_made(two_clusters, tmp_path):
    """One line each; nothing is half-initialized: the next call of the same processes is as good as the
    first.
    """
    (tmp_path / "calls.json").write_text(json.dumps([arguments for arguments, _ in REFUSED]))
    script, calls = str(SCRIPTS / "megatron_refusals.py"), str(tmp_path / "calls.json")
    lines = two_clusters.json(two_clusters.run(script, calls, *two_clusters.holmes))
    for line in lines:
        for (told, left), (_, expected) in zip(line["told"], REFUSED, strict=True):
            assert re.match(expected, told) and not left, (told, expected)
    assert [line["sum"] for line in lines] == [1, 1, 5, 5]


@pytest.mark.skipif(
    INSTALLED < Version("0.14"), reason="the script uses HyperCommGrid, which is there from 0.14 on"
)
def test_the_drop_in_initializer_needs_no_flag(two_clusters):
    """Launched in turn, a0 b0 a1 b1, the program ends up on ranks where its data-parallel groups are inside a
    cluster.
    """
    env = {"HOLMES_CLUSTER": str(two_clusters.file), "OMP_NUM_THREADS": "1"}
    lines = two_clusters.json(two_clusters.run(str(SCRIPTS / "megatron_drop_in.py"), env=env))
    assert [line["node"][0] for line in lines] in (["a", "a", "b", "b"], ["b", "b", "a", "a"])
    assert [line["before"] for line in lines] != [line["rank"] for line in lines]
    assert [line["data"] for line in lines] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [line["sum"] for line in lines] == [1, 1, 5, 5]
    assert {line["fabric"] for line in lines} == {"ib", "roce"}
    for line in lines:  # a grid without parallel_state, and four stages over it
        assert line["grid"] == line["data"] and line["grid_fabric"] == line["fabric"], line
        assert set(line["pairs"]) == {line["fabric"], "ethernet"}, (
            line
        )  # one neighbour inside, one across
        assert line["chain"] == line["rank"] + 1
