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

megatron_version = megatron_core()
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
#: Splits with models of other sizes.
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
    if megatron_version < Version("0.15"):  # has no checkpoints that other splits can load
        unsupported += ["--save", "--load"]
    if megatron_version < Version("0.14"):  # pins memory for context parallelism, which needs a GPU
        unsupported += ["--context"]
    # Has no layouts, and needs Transformer Engine for this optimizer.
    if megatron_version < Version("0.13"):
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
        for expected, entry in zip(stock[name]["entries"], holmes[name]["entries"], strict=True):
            assert abs(expected["loss"] - entry["loss"]) <= 1e-6, (name, expected, entry)
            assert abs(expected["grad_norm"] - entry["grad_norm"]) <= 2e-6, (name, expected, entry)


def losses_of(split):
    """Return the loss of each step from the result of a split."""
    return [entry["loss"] for entry in split["entries"]]


@pytest.mark.row("megatron-core")
@pytest.mark.each_landing
@over_nccl
def test_losses_and_gradient_norms_are_stocks_under_every_split(both, splits):
    (stock, _, _), (holmes, _, _) = both
    assert_stocks(stock, holmes, splits)


@over_nccl
def test_the_split_does_not_change_what_is_learned(both):
    """Losses do not depend on the split, and a checkpoint is resumed exactly.

    The example's initial weights are the same for all splits.
    """
    for results, _, _ in both:  # without and with holmes
        expected = {entry["step"]: entry for entry in results["pipeline 2"]["entries"]}
        for name in SPLITS.keys() & results.keys():
            for entry in results[name]["entries"]:
                expected_entry = expected[entry["step"]]
                for value in ("loss", "grad_norm"):
                    assert abs(entry[value] - expected_entry[value]) <= 5e-6, (name, entry)
        resumed = results.get("resumed with other stages")
        if resumed:
            assert [entry["step"] for entry in resumed["entries"]] == [3, 4]


@gpu_only
@pytest.mark.parametrize(
    "how", some(["synchronize", *ONE_AT_A_TIME], "CUDA_DEVICE_MAX_CONNECTIONS")
)
@over_nccl
def test_messages_that_come_early_hold_nothing_up(two_clusters, both, tmp_path, how):
    """Jobs train if the host waits for the device in each layer, or for each launch.

    They also train if all CUDA streams share one hardware queue.
    """
    through = (WAITS, how) if how == "synchronize" else ()
    wanted = {name: SPLITS[name] for name in ("pipeline 2", "tensor 2 pipeline 2")}
    results, _, output = train_megatron(
        two_clusters,
        tmp_path,
        wanted,
        *two_clusters.holmes,
        through=through,
        **ONE_AT_A_TIME.get(how, {}),
    )
    # The message is printed for modules that are preloaded, which is not possible with a physical GPU.
    assert "megatron-stage-links" in output or PHYSICAL
    stock, _, _ = both[0]
    assert_stocks(stock, results, wanted)


@full
@pytest.mark.skipif(megatron_version < Version("0.14"), reason="its sends are no class's")
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
    """Holmes overlaps the reductions of both stages, which take long on these networks.

    megatron-core by itself does not overlap the reduction of the later stage.
    """
    (stock, _, _), (holmes, _, _) = both
    assert stock["pipeline 2"]["buckets"] == {str(rank): [0] for rank in range(4)}
    buckets = holmes["pipeline 2"]["buckets"]
    assert all(count > 2 for (count,) in buckets.values()), buckets
    if "overlap" in stock:  # not among the few splits that run over NCCL
        assert stock["overlap"]["buckets"]["2"] == [1]
        assert holmes["overlap"]["buckets"]["2"][0] > 2
    # Four stages have nothing to reduce. Holmes keeps a distributed optimizer's buckets without the flag
    # --holmes-overlap on, because checkpoints may depend on them.
    for name in {"pipeline 4", "distributed optimizer"} & stock.keys():
        assert holmes[name]["buckets"] == stock[name]["buckets"]


@full
@gloo_only  # stock cannot resume its distributed optimizer on a GPU without Apex or Transformer Engine
def test_the_distributed_optimizer_and_experts_overlap_when_told_to(two_clusters, tmp_path):
    """With --holmes-overlap on, losses are the same, also of a resumed job.

    Buckets need no padding, and weights are gathered during the forward pass.
    """
    distributed = {
        name: flags for name, flags in SPLITS.items() if "--distributed-optimizer" in flags
    }
    splits = distributed | OTHERS
    (tmp_path / "stock").mkdir()
    stock, _, _ = train_megatron(two_clusters, tmp_path / "stock", splits)
    (tmp_path / "holmes").mkdir()
    flags = (*two_clusters.holmes, "--holmes-overlap", "on")
    holmes, _, _ = train_megatron(two_clusters, tmp_path / "holmes", splits, *flags)
    assert_stocks(stock, holmes, splits)
    narrow = holmes["distributed optimizer"]["buckets"]
    # These versions would save padded buckets wrong, and small buckets of narrow layers need padding.
    if megatron_version < Version("0.20"):
        assert narrow == {"0": [3], "1": [3], "2": [1], "3": [1]}
    else:
        assert all(count > 3 for (count,) in narrow.values()), narrow
    assert all(count > 3 for (count,) in holmes["wide"]["buckets"].values()), holmes["wide"]
    assert not any(stock["wide"]["gathers"].values()) and all(holmes["wide"]["gathers"].values())


@over_nccl
def test_gradients_leave_ethernet(both):
    """Without holmes all data uses Ethernet; with holmes only the data between clusters does."""
    (_, stock_sent, _), (_, holmes_sent, _) = both
    for node, stock_nics in stock_sent.items():
        nics = holmes_sent[node]
        assert fast(stock_nics) < 0.1, (node, stock_nics)
        assert nics["eth0"] < 0.6 * stock_nics["eth0"], (node, stock_nics, nics)
        assert fast(nics) > 0.4 * stock_nics["eth0"], (node, stock_nics, nics)


@full
def test_a_pair_of_stages_inside_a_cluster_uses_its_fabric(two_clusters, tmp_path):
    """Stages inside a cluster use its network, with batched and with unbatched sends.

    There are 4 stages: a0-a1 and b0-b1 are inside clusters, a1-b0 uses Ethernet. The plain schedule sends
    in batches, the interleaved schedule does not.
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
        folder = tmp_path / name
        folder.mkdir()
        results, sent, output = train_megatron(
            two_clusters, folder, splits, *two_clusters.holmes, HOLMES_VERBOSE="on"
        )
        # Output of a chunk, in one direction: samples x sequence x hidden x 4 bytes
        activations_mb = steps * micro_batches * 2 * 32 * hidden * 4 / 1e6
        has_stage_links = name == "batched" and megatron_version >= Version("0.14")
        group = "pipeline activations" if has_stage_links else "pipeline pair"
        backend = "nccl" if ON_GPUS else "gloo"
        assert re.search(rf"group {group} \[0,1\] {backend}: \S+ via ib0", output)
        assert re.search(rf"{group} \[2,3\] {backend}: \S+ via roce0", output)
        for node in ("a0", "b1"):  # ends of the pipeline, whose neighbour is inside the cluster
            assert fast(sent[node]) > activations_mb, (name, node, sent[node])
            if name == "batched":
                assert sent[node]["eth0"] < 0.5 * activations_mb, (name, node, sent[node])
        losses[name] = losses_of(results["chain"])
    assert losses["batched"] == pytest.approx(losses["unbatched"], abs=1e-6)
    assert re.search(rf"group pipeline twin \[0,1\] {backend}: \S+ via ib0", output)
    assert re.search(rf"twin \[2,3\] {backend}: \S+ via roce0", output)


def plan_of(two_clusters, directory, stage_layers):
    """Save a plan with these layers of each stage, and return the flags with which a job uses it."""
    plan = build_plan(site_from_spec(two_clusters.spec), Sizes(pipeline=2))
    replace(plan, stage_layers=stage_layers, partition="speed").save(directory / "plan.json")
    return *two_clusters.holmes, "--holmes-plan", str(directory / "plan.json")


def test_layers_of_the_plan_are_built(two_clusters, tmp_path, both):
    """The job builds the layers that the plan gives to each stage.

    The plans are uneven, with each way to recompute, and interleaved with a chunk that has no layer. A
    layout of the user takes precedence over the plan.
    """
    flags = plan_of(two_clusters, tmp_path, (3, 1))
    recomputed = [
        f"--recompute {way}"
        for way in ("selective", "uniform", "block", "block --recompute-layers 2")
    ]
    further_flags = {"planned": "", **{name: name for name in recomputed}}  # by name of the split
    if megatron_version >= Version("0.13"):
        further_flags["own"] = "--layout Et|tttL"
    splits = {
        name: f"--pipeline 2 --micro-batches 4 --steps 2 {text}"
        for name, text in further_flags.items()
    }
    results, _, output = train_megatron(two_clusters, tmp_path, splits, *flags)
    (stock, _, _), _ = both
    for name in ("planned", *recomputed):
        split = results[name]
        assert split["layers"] == {"0": [1, 2, 3], "1": [1, 2, 3], "2": [4], "3": [4]}, name
        for entry, expected in zip(split["entries"], stock["pipeline 2"]["entries"]):
            assert abs(entry["loss"] - expected["loss"]) <= 5e-6, (name, entry, expected)
            assert abs(entry["grad_norm"] - expected["grad_norm"]) <= 5e-6, (name, entry, expected)
    flags = plan_of(two_clusters, tmp_path, (1, 2, 0, 1))
    interleaved = {"interleaved": "--pipeline 2 --virtual-pipeline 2 --micro-batches 4 --steps 2"}
    # Without layouts, only the first and the last stage can have another number of layers.
    if megatron_version < Version("0.13"):
        _, _, output = train_megatron(two_clusters, tmp_path, interleaved, *flags, returncode=2)
        assert (
            output.count("lets only the first and the last stage have layers of their own") == 1
        ), output
        assert "Traceback" not in output
        return
    layers = {"0": [1], "1": [1], "2": [2, 3, 4], "3": [2, 3, 4]}  # rank -> numbers
    assert results["own"]["layers"] == layers
    assert "your own (Et|tttL) wins over the plan's (3+1)" in output
    own_losses = losses_of(results["own"])
    assert losses_of(results["planned"]) == pytest.approx(own_losses, abs=1e-6)
    results, _, _ = train_megatron(two_clusters, tmp_path, interleaved, *flags)
    assert results["interleaved"]["layers"] == layers
    assert losses_of(results["interleaved"]) == pytest.approx(own_losses, abs=1e-6)


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
    megatron_version < Version("0.13"),
    reason="its writer of checkpoints does not fit torch 2.13 (stock)",
)
@full
def test_a_checkpoint_of_another_model_is_one_line(two_clusters, tmp_path):
    """The example refuses the checkpoint, with a line from each node that reads it in time."""
    splits = {
        "saved": "--pipeline 2 --micro-batches 4 --steps 1 --save {results}/saved",
        "another": "--hidden 64 --pipeline 2 --micro-batches 4 --steps 2 --load {results}/saved",
    }
    done, _, output = train_megatron(
        two_clusters, tmp_path, splits, *two_clusters.holmes, returncode=2
    )
    assert list(done) == ["saved"] and "Traceback" not in output, output
    assert "saved with hidden 32, but this job has hidden 64" in output, output


#: (arguments of initialize_model_parallel on 4 ranks, pattern of the error).
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
    """Each bad call fails with one line, and a later call in the same processes succeeds."""
    (tmp_path / "calls.json").write_text(json.dumps([arguments for arguments, _ in REFUSED]))
    script = str(SCRIPTS / "megatron_refusals.py")
    calls = str(tmp_path / "calls.json")
    lines = two_clusters.json(two_clusters.run(script, calls, *two_clusters.holmes))
    for line in lines:
        for (error, has_groups), (_, expected) in zip(line["told"], REFUSED, strict=True):
            assert re.match(expected, error) and not has_groups, (error, expected)
    assert [line["sum"] for line in lines] == [1, 1, 5, 5]


@pytest.mark.skipif(
    megatron_version < Version("0.14"),
    reason="the script uses HyperCommGrid, which is there from 0.14 on",
)
@gloo_only  # the script uses gloo, which does not wait for what a GPU computes
def test_the_drop_in_initializer_needs_no_flag(two_clusters):
    """The program's data-parallel groups are inside a cluster, although it was launched in turn.

    The launcher starts a0, b0, a1, b1, and initialize_model_parallel of holmes renumbers the ranks.
    integration_tests/rows calls it over NCCL.
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
        # One neighbour is inside the cluster, one across.
        assert set(line["pairs"]) == {line["fabric"], "ethernet"}, line
    assert [line["chain"] for line in lines] == [line["rank"] + 1 for line in lines]
