"""Megatron-DeepSpeed's unmodified pretrain_gpt.py on two emulated clusters, stock and with --holmes.

tests/checkouts.py says where the checkout is. Each landing trains one configuration of the matrix, and a
tenth of the others.
"""

import base64
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from checkouts import find_checkout, why_missing

from integration_tests.jobs import CLUSTER, fast, full, some
from integration_tests.megatron_deepspeed.job import Checkout, holmes_lines, read_log

SOURCE = find_checkout("Megatron-DeepSpeed")
STEPS = 20
pytestmark = [
    pytest.mark.row("Megatron-DeepSpeed's pretrain_gpt.py"),
    pytest.mark.skipif(SOURCE is None, reason=why_missing("Megatron-DeepSpeed")),
]
PIPELINE = ("--pipeline-model-parallel-size", "2")
TENSOR = (*PIPELINE, "--tensor-model-parallel-size", "2")
NO_PIPELINE = ("--no-pipeline-parallel",)
#: flags of pretrain_gpt.py, ZeRO stage, dtype
MATRIX = {
    "pipeline 2 x data 2": (PIPELINE, 0, "fp32"),
    "pipeline 2 x data 2, ZeRO 1": (PIPELINE, 1, "fp32"),
    "pipeline 2 x data 2, bf16": (PIPELINE, 0, "bf16"),
    "pipeline 2 x data 2, ZeRO 1, bf16": (PIPELINE, 1, "bf16"),
    "pipeline 2 x tensor 2": (TENSOR, 0, "fp32"),
    "pipeline 2 x tensor 2, ZeRO 1, bf16": (TENSOR, 1, "bf16"),
    # its SequenceParallelPositionEmbedding is handed the positions of the whole sequence, and fails (stock
    # too)
    "pipeline 2 x tensor 2, sequence parallel": ((*TENSOR, "--sequence-parallel", "--no-position-embedding"),
                                                 0, "fp32"),
    "no pipeline, sequence 2, ZeRO 1": ((*NO_PIPELINE, "--ds-sequence-parallel-size", "2"), 1, "fp32"),
    "no pipeline, tensor 2, ZeRO 1": ((*NO_PIPELINE, "--tensor-model-parallel-size", "2"), 1, "fp32"),
    "no pipeline, data 4, ZeRO 1": (NO_PIPELINE, 1, "fp32"),
    "no pipeline, data 4, ZeRO 2": (NO_PIPELINE, 2, "fp32"),
    "no pipeline, data 4, ZeRO 3": (NO_PIPELINE, 3, "fp32"),
}
DEFAULT = ("pipeline 2 x data 2",)
#: Variables under which holmes adds gradients in stock's order: then losses must be equal in every digit.
#:
#: A tied embedding has a gradient on each of 2 stages x 2 data-parallel ranks: a0, a1 on the first stage and
#: b0, b1 on the last.
#:     stock     ((a0 + b0) + (a1 + b1)) / 2    two gradients of each stage cross clusters
#:     holmes    (a0 + a1) / 2 + (b0 + b1) / 2  one gradient of each stage crosses (runtime/reduce/tied.py)
#: Four numbers are rounded differently in another order. Stock's order cannot be kept with less traffic: for
#: a0 + b0 and a1 + b1 two gradients must cross. integration_tests/deepspeed/test_tied.py compares the order
#: of the sum bit by bit. All else is stock's: with that sum off, the hashes of all activations, gradients and
#: weights of all ranks were equal after each pass, reduction and optimizer step.
STOCK_ORDER = {"HOLMES_DISABLE": "deepspeed-tied"}
#: How far a printed loss may differ in 20 steps with the tied embedding summed in holmes's order. Measured:
#: 1e-6, one unit of the last digit.
OTHER_ORDER = 1e-5


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    for name in ("regex", "six", "transformers"):
        pytest.importorskip(name, reason="Megatron-DeepSpeed's tokenizers need: pip install regex six "
                                         "transformers")
    pytest.importorskip("pybind11", reason="Megatron-DeepSpeed's dataset index needs: pip install pybind11")
    pytest.importorskip("nltk", reason="Megatron-DeepSpeed's preprocess_data.py needs: pip install nltk")
    folder = tmp_path_factory.mktemp("megatron_deepspeed")
    yield Checkout(SOURCE, folder)
    shutil.rmtree(folder)


def train(checkout, two_clusters, *flags, steps=STEPS, env=None, **more):
    """What the log says, and MB that every NIC sent."""
    before = two_clusters.lab.counters()
    result = checkout.run(two_clusters, *checkout.arguments(steps, *flags, **more), env=env, timeout=420)
    return read_log(result), two_clusters.sent(before)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", some(MATRIX, *DEFAULT))
def test_same_losses_as_stock_and_gradients_inside_clusters(checkout, two_clusters, case):
    flags, zero, dtype = MATRIX[case]
    stock, stock_sent = train(checkout, two_clusters, *flags, zero=zero, dtype=dtype)
    ours, sent = train(checkout, two_clusters, *flags, *two_clusters.holmes, zero=zero, dtype=dtype)
    assert list(stock.losses) == list(range(1, STEPS + 1)) and stock.losses[STEPS] < stock.losses[1] - 0.5
    print(f"\n{case}: losses {stock.losses[1]} ... {stock.losses[STEPS]}, greatest difference"
          f" {max(abs(stock.losses[i] - ours.losses[i]) for i in stock.losses)}; MB stock {stock_sent}, "
          f"holmes {sent}")
    # Four ranks add the same numbers in another order; with two summands there is no other order.
    four = "data 4" in case or "sequence 2" in case
    # A tied embedding has four summands where the stage has two data-parallel ranks (STOCK_ORDER).
    tied = "x data 2" in case
    if four:
        assert ours.losses == pytest.approx(stock.losses, abs=1e-4)
    elif tied:
        assert ours.losses == pytest.approx(stock.losses, abs=OTHER_ORDER if dtype == "fp32" else 1e-2)
        assert "tied weights summed in two levels" in ours.lines[0]
        in_order, _ = train(checkout, two_clusters, *flags, *two_clusters.holmes, zero=zero, dtype=dtype,
                            env=STOCK_ORDER)
        assert in_order.losses == stock.losses
    else:
        assert ours.losses == stock.losses
    assert not stock.lines and "2 clusters" in ours.lines[0]
    assert len(ours.lines) == 1 + ("ZeRO 3" in case)
    assert "ZeRO 3" not in case or "keeps DeepSpeed's own collectives" in ours.lines[1]
    for node, nics in sent.items():
        assert fast(stock_sent[node]) < 0.01
        if "ZeRO 3" in case:  # one group over all, and collectives that stay DeepSpeed's own
            assert fast(nics) < 1 and nics["eth0"] > 100
        elif "data 4" in case:  # one group over all: gradients in two levels
            assert fast(nics) > 1 and nics["eth0"] < 0.8 * stock_sent[node]["eth0"]
        else:
            # tensors of hidden size 64 are little beside GPT-2's tied embedding, which crosses
            share = 0.25 if "x data 2" in case else 0.02
            assert fast(nics) > share * stock_sent[node]["eth0"], (node, nics, stock_sent[node])
    spared = sum(nics["eth0"] for nics in stock_sent.values()) - sum(nics["eth0"] for nics in sent.values())
    moved = sum(map(fast, sent.values()))
    # What fast NICs carry is spared on Ethernet. With N bytes of gradients on a rank, E of them of a tied
    # embedding: two levels send E on fast NICs and E / 2 across, instead of E across. Then N + E are on fast
    # NICs and N + E / 2 are spared, which is at least 3/4 of that.
    share = 0.7 if tied else 0.9
    assert "data 4" in case or spared > share * moved, (stock_sent, sent)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("zero", some([0, 1], 1))
def test_checkpoints_pass_between_stock_and_holmes(checkout, two_clusters, tmp_path, zero):
    """Saved under one and resumed under the other, with the same split: exactly the losses of the run that
    was not stopped."""

    def run(*flags):
        return train(checkout, two_clusters, *PIPELINE, *flags, steps=6, zero=zero, env=STOCK_ORDER)[0]

    whole = run()
    sides = {"stock": (), "holmes": two_clusters.holmes}
    for saver, loader in (("stock", "holmes"), ("holmes", "stock")):
        place = str(tmp_path / saver)
        run(*sides[saver], "--save", place, "--save-interval", "3", "--exit-interval", "3")
        resumed = run(*sides[loader], "--load", place)
        assert resumed.losses == {step: loss for step, loss in whole.losses.items()
                                  if step > 3}, (saver, loader)


#: Without padded rows: ds_to_universal drops what training made of them, and the loss is another.
NO_PADDING = ("--make-vocab-size-divisible-by", "1")


def converted(line: str, checkout, folder: Path) -> None:
    """Run the command that holmes gave for the checkpoint in `folder`."""
    command = re.search(
        r"python (-m deepspeed\.checkpoint\.ds_to_universal --input_folder \S+ --output_folder \S+?),",
                        line)
    assert command and str(folder) in command[1], line
    checkout.check([sys.executable, *command[1].split()])


@pytest.mark.timeout(1200)
def test_another_split_is_refused_and_its_universal_checkpoint_goes_on(
        checkout, two_clusters, tmp_path, exhaustive):
    """Stock 2+2 -> holmes 3+1 (and others) -> stock 2+2: the losses of the run that was not stopped, in every
    printed digit.

    The conversions are those that holmes asks for; activation checkpointing and tied embeddings are on.
    """
    flags = (*PIPELINE, *NO_PADDING, "--checkpoint-activations", "--checkpoint-num-layers", "2")
    holmes = (*two_clusters.holmes, "--holmes-partition")

    def run(*more):
        return train(checkout, two_clusters, *flags, *more, steps=8, zero=1, env=STOCK_ORDER)[0].losses

    whole = run()
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    run("--save", str(stock), "--save-interval", "3", "--exit-interval", "3")
    line = refused(checkout, two_clusters, *flags, "--holmes-partition", "3,1", "--load", str(stock), zero=1)
    assert "was saved with stages of 4+4 modules, this job has stages of 5+3 modules" in line
    converted(line, checkout, stock)
    load = ("--load", str(stock), "--universal-checkpoint")
    resumed = {step: loss for step, loss in whole.items() if step > 3}
    if exhaustive:
        for partition in ("balanced", "speed"):
            assert run(*holmes, partition, *load) == resumed, partition
        # 4 stages leave one data-parallel rank, which adds 8 micro-batches where two ranks added 4 each
        four_stages = ("--pipeline-model-parallel-size", "4", *two_clusters.holmes)
        assert run(*four_stages, *load) == pytest.approx(resumed, abs=1e-5)
    taken = run(*holmes, "3,1", *load, "--save", str(ours), "--save-interval", "6", "--exit-interval", "6")
    assert taken == {step: loss for step, loss in whole.items() if 3 < step <= 6}
    line = refused(checkout, two_clusters, *flags, "--load", str(ours), zero=1)
    assert "was saved with stages of 5+3 modules, this job has stages of 4+4 modules" in line
    converted(line, checkout, ours)
    taken = run("--load", str(ours), "--universal-checkpoint")
    assert taken == {step: loss for step, loss in whole.items() if step > 6}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("zero, dtype", [(1, "fp32"), pytest.param(0, "fp32", marks=full),
                                         pytest.param(0, "bf16", marks=full)])
def test_overlapped_reduction_leaves_the_losses(checkout, two_clusters, zero, dtype):
    stock, _ = train(checkout, two_clusters, *PIPELINE, steps=8, zero=zero, dtype=dtype)
    ours, _ = train(checkout, two_clusters, *PIPELINE, *two_clusters.holmes, "--holmes-overlap", "on",
                    steps=8, zero=zero, dtype=dtype, env=STOCK_ORDER)
    assert ours.losses == stock.losses
    # no line that says why it is not overlapped
    assert len(ours.lines) == 1 and "overlap" in ours.lines[0], ours.lines


#: What stands before the script on each node, as each launcher starts it.
LAUNCHED = {
    "deepspeed": "{python} -m deepspeed.launcher.launch --world_info={world} --node_rank=$NODE_RANK"
    " --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT",
    "srun": "env SLURM_STEP_ID=0 SLURM_PROCID=$RANK SLURM_NTASKS=$WORLD_SIZE SLURM_LOCALID=$LOCAL_RANK"
    " SLURM_NTASKS_PER_NODE=1 LOCAL_SIZE=1 {python}",
    "mpirun": "env OMPI_COMM_WORLD_RANK=$RANK OMPI_COMM_WORLD_SIZE=$WORLD_SIZE "
    "OMPI_COMM_WORLD_LOCAL_RANK=$LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE=1 LOCAL_SIZE=1 {python}",
}
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "GROUP_RANK",
            "GROUP_WORLD_SIZE")


def launched(checkout, two_clusters, launcher, nodes, *arguments):
    """The result of a script started by `launcher` on every node of the lab; `nodes`: those of the
    hostfile."""
    world = base64.urlsafe_b64encode(json.dumps({node: [0] for node in nodes}).encode()).decode()
    start = LAUNCHED[launcher].format(python=sys.executable, world=world)
    only = " || ".join(f"[ $HOLMES_LAB_NODE = {node} ]" for node in nodes)
    unset = " ".join(f"-u {name}" for name in TORCHRUN)
    command = f"{{ {only}; }} || exit 0; exec env {unset} {start} {' '.join(arguments)}"
    return two_clusters.run("sh", "-c", command, env=checkout.env, cwd=checkout.folder, timeout=300)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("launcher", some(LAUNCHED, "deepspeed"))
def test_started_by_other_launchers(checkout, two_clusters, launcher):
    stock, _ = train(checkout, two_clusters, *PIPELINE, steps=3)
    result = launched(checkout, two_clusters, launcher, two_clusters.order,
                      *checkout.arguments(3, *PIPELINE, *two_clusters.holmes))
    ours = read_log(result)
    assert ours.losses == pytest.approx(stock.losses, abs=OTHER_ORDER)
    assert len(ours.lines) == 1 and "ranks renumbered" in ours.lines[0], ours


def refused(checkout, two_clusters, *flags, env=None, **more):
    """The one line with which holmes ends the job, status 2 and no traceback on any rank."""
    command = checkout.arguments(2, *flags, *two_clusters.holmes, **more)
    result = checkout.run(two_clusters, *command, env=env, timeout=240)
    text = "\n".join(result.outputs.values())
    assert result.returncode == 2 and "Traceback" not in text, text[-6000:]
    # The banner and the partition are printed before the checkpoint is read.
    said = [line for line in holmes_lines(result) if " clusters: " not in line and "stages begin" not in line]
    assert len(said) == 1, said
    return said[0]


@pytest.mark.timeout(600)
def test_flags_in_its_own_help_and_near_misses(checkout, two_clusters):
    result = checkout.run(two_clusters, *checkout.arguments(2, *PIPELINE, *two_clusters.holmes, "--help"),
                          timeout=240)
    assert result.returncode == 0, result.outputs
    text = result.outputs[0] if "--tensor-model-parallel-size" in result.outputs[0] else "".join(
        result.outputs.values())
    assert "--holmes-cluster" in text and "holmes:" in text and "Percent of rotary dimension" in text
    result = checkout.run(two_clusters,
                          *checkout.arguments(2, *PIPELINE, *two_clusters.holmes, "--holms-plan", "x"),
                          timeout=240)
    text = "".join(result.outputs.values())
    assert result.returncode == 2 and "Traceback" not in text
    assert "error: unrecognized arguments: --holms-plan x; --holms-plan: did you mean --holmes-plan?" in text


@pytest.mark.timeout(600)
def test_a_ds_config_that_contradicts_the_plan(checkout, two_clusters):
    config = checkout.config(pipeline={"stages": 4})
    line = refused(checkout, two_clusters, *PIPELINE, config=config)
    assert str(config) in line and "key 'pipeline.stages' is 4, but the plan has 2" in line


@pytest.mark.timeout(600)
def test_a_hostfile_that_does_not_match_the_clusters(checkout, two_clusters, tmp_path):
    """What `deepspeed --hostfile` starts on each node (deepspeed.launcher.launch) when cluster.toml lacks a
    node."""
    file = tmp_path / "c.toml"
    file.write_text(CLUSTER.read_text().replace("b[0-1]", "b0"))
    result = launched(checkout, two_clusters, "deepspeed", two_clusters.order,
                      *checkout.arguments(2, *NO_PIPELINE, "--holmes", "--holmes-cluster", str(file)))
    said = [line for output in result.outputs.values() for line in output.splitlines()
            if line.startswith("holmes:")]
    assert result.returncode != 0 and len(said) == 1, result.outputs
    assert "hostfile has 4 hosts" in said[0] and "host 'b1' is in no cluster" in said[0]
