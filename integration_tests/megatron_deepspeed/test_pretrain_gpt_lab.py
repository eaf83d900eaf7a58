"""Tests Megatron-DeepSpeed's unmodified pretrain_gpt.py with holmes, on two emulated clusters of 2 nodes.

Most tests train a small GPT twice: with --holmes, and without any flag of holmes ("stock"). They compare the
losses that the script prints.

CASES lists the combinations of parallelism, ZeRO stage and dtype. By default, the first of them and few
of the others run; HOLMES_TEST_FULL=1 runs all. tests/checkouts.py says where the checkout of
Megatron-DeepSpeed is searched. Without a checkout, all tests are skipped.
"""

import base64
import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkouts import find_checkout, why_missing

from integration_tests.jobs import CLUSTER, FULL, fast, full, some
from integration_tests.megatron_deepspeed.job import Checkout, holmes_lines, read_log

SOURCE = find_checkout("Megatron-DeepSpeed")
STEPS = 20 if FULL else 8  # optimizer steps of a run that compares losses
pytestmark = [
    pytest.mark.row("Megatron-DeepSpeed's pretrain_gpt.py"),
    pytest.mark.skipif(SOURCE is None, reason=why_missing("Megatron-DeepSpeed")),
]
PIPELINE = ("--pipeline-model-parallel-size", "2")
NO_PIPELINE = ("--no-pipeline-parallel",)


@dataclass(frozen=True)
class Case:
    """A training run on 4 ranks: how they share the model and the data, the ZeRO stage and the dtype."""

    name: str  # the test's id
    pipeline: int = 1  # stages
    data: int = 1  # data-parallel ranks
    tensor: int = 1  # tensor-parallel ranks
    sequence: int = 1  # ranks that share a sequence (DeepSpeed-Ulysses)
    zero_stage: int = 0
    dtype: str = "fp32"
    further_flags: tuple[str, ...] = ()  # of pretrain_gpt.py

    def __post_init__(self):
        assert self.pipeline * self.data * self.tensor * self.sequence == 4, self.name

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of pretrain_gpt.py that set the pipeline, tensor and sequence parallel sizes."""
        flags = NO_PIPELINE
        if self.pipeline > 1:
            flags = ("--pipeline-model-parallel-size", str(self.pipeline))
        if self.tensor > 1:
            flags += ("--tensor-model-parallel-size", str(self.tensor))
        if self.sequence > 1:
            flags += ("--ds-sequence-parallel-size", str(self.sequence))
        return flags + self.further_flags

    @property
    def sums_four_gradients(self) -> bool:
        """Return whether gradients are sums over all 4 ranks, so that rounding depends on the order."""
        return self.data * self.sequence == 4

    @property
    def is_tied_over_four_ranks(self) -> bool:
        """Return whether the tied embedding's gradient is a sum over 2 stages x 2 data-parallel ranks.

        The rounding of such a sum depends on the order of the ranks.
        """
        return self.pipeline == 2 and self.data == 2


CASES = {
    case.name: case
    for case in (
        Case("pipeline 2 x data 2", pipeline=2, data=2),
        Case("pipeline 2 x data 2, ZeRO 1", pipeline=2, data=2, zero_stage=1),
        Case("pipeline 2 x data 2, bf16", pipeline=2, data=2, dtype="bf16"),
        Case("pipeline 2 x data 2, ZeRO 1, bf16", pipeline=2, data=2, zero_stage=1, dtype="bf16"),
        Case("pipeline 2 x tensor 2", pipeline=2, tensor=2),
        Case(
            "pipeline 2 x tensor 2, ZeRO 1, bf16", pipeline=2, tensor=2, zero_stage=1, dtype="bf16"
        ),
        Case(
            "pipeline 2 x tensor 2, sequence parallel",
            pipeline=2,
            tensor=2,
            # With position embeddings Megatron-DeepSpeed's SequenceParallelPositionEmbedding fails, in stock
            # too: it receives the positions of the whole sequence.
            further_flags=("--sequence-parallel", "--no-position-embedding"),
        ),
        Case("no pipeline, sequence 2, ZeRO 1", data=2, sequence=2, zero_stage=1),
        Case("no pipeline, tensor 2, ZeRO 1", data=2, tensor=2, zero_stage=1),
        Case("no pipeline, data 4, ZeRO 1", data=4, zero_stage=1),
        Case("no pipeline, data 4, ZeRO 2", data=4, zero_stage=2),
        Case("no pipeline, data 4, ZeRO 3", data=4, zero_stage=3),
    )
}
#: Environment variables under which holmes adds gradients in stock's order: losses are equal in every digit.
#:
#: A tied embedding has a gradient on each of 2 stages x 2 data-parallel ranks: a0, a1 on the first stage and
#: b0, b1 on the last.
#:     stock     ((a0 + b0) + (a1 + b1)) / 2    two gradients of each stage cross clusters
#:     holmes    (a0 + a1) / 2 + (b0 + b1) / 2  one gradient of each stage crosses (runtime/reduce/tied.py)
#: Four numbers are rounded differently in another order. Stock's order cannot be kept with less traffic: for
#: a0 + b0 and a1 + b1 two gradients must cross. integration_tests/deepspeed/test_tied.py compares the order
#: of the sum bit by bit. No other sum changes its order: with deepspeed-tied switched off, the hashes of all
#: activations, gradients and weights of all ranks equalled stock's after each pass, reduction and optimizer
#: step.
STOCK_ORDER = {"HOLMES_DISABLE": "deepspeed-tied"}
#: Keeps the planned number of micro-batches in flight. On a busy machine steps are slow, and holmes would
#: adapt the plan, and print a line about it.
KEEP_PLAN = ("--holmes-adapt", "off")
#: Largest difference of a printed loss in 20 steps when holmes sums the tied embedding in its own order.
#: Measured: 1e-6, which is one unit of the last digit.
OTHER_ORDER = 1e-5


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    for name in ("regex", "six", "transformers"):
        pytest.importorskip(
            name, reason="Megatron-DeepSpeed's tokenizers need: pip install regex six transformers"
        )
    pytest.importorskip(
        "pybind11", reason="Megatron-DeepSpeed's dataset index needs: pip install pybind11"
    )
    pytest.importorskip(
        "nltk", reason="Megatron-DeepSpeed's preprocess_data.py needs: pip install nltk"
    )
    folder = tmp_path_factory.mktemp("megatron_deepspeed")
    copy = Checkout(SOURCE, folder)
    if FULL:
        copy.compile_adam()  # takes a minute of a core; the first job would take too long if it compiled it
    else:
        copy.use_adam_of_torch()
    yield copy
    shutil.rmtree(folder)


def train(checkout, two_clusters, *flags, steps=STEPS, env=None, **more):
    """Run pretrain_gpt.py on the nodes of two emulated clusters.

    Args:
        checkout: The copy of Megatron-DeepSpeed.
        two_clusters: The emulated nodes and networks.
        flags: Further arguments of pretrain_gpt.py.
        more: Passed to Checkout.arguments, e.g. zero=1 or dtype="bf16".

    Returns:
        The Log (losses, step times and messages of holmes), and the MB that each NIC of each node sent.
    """
    before = two_clusters.lab.counters()  # bytes of each NIC
    command = checkout.arguments(steps, *flags, **more)
    result = checkout.run(two_clusters, *command, env=env, timeout=420)
    return read_log(result), two_clusters.sent(before)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", some(CASES, "pipeline 2 x data 2"))
def test_same_losses_as_stock_and_gradients_inside_clusters(checkout, two_clusters, name):
    """The losses with --holmes equal those without, and gradients take the clusters' fast NICs, not Ethernet.

    Where the gradients of four ranks are added, the losses may differ by rounding.
    """
    case = CASES[name]
    precision = {"zero": case.zero_stage, "dtype": case.dtype}
    holmes_flags = (*case.flags, *two_clusters.holmes, *KEEP_PLAN)
    stock, stock_sent = train(checkout, two_clusters, *case.flags, **precision)
    ours, sent = train(checkout, two_clusters, *holmes_flags, **precision)
    assert list(stock.losses) == list(range(1, STEPS + 1))
    assert stock.losses[STEPS] < stock.losses[1] - 0.5  # the model learns
    difference = max(abs(stock.losses[step] - ours.losses[step]) for step in stock.losses)
    print(
        f"\n{name}: losses {stock.losses[1]} ... {stock.losses[STEPS]}, greatest difference {difference}; "
        f"MB stock {stock_sent}, holmes {sent}"
    )

    if case.sums_four_gradients:
        # holmes reduces hierarchically, which adds the same four numbers in another order than stock.
        assert ours.losses == pytest.approx(stock.losses, abs=1e-4)
    elif case.is_tied_over_four_ranks:
        # holmes adds the four gradients of the tied embedding in another order than stock.
        tolerance = OTHER_ORDER if case.dtype == "fp32" else 1e-2  # bf16 rounds
        assert ours.losses == pytest.approx(stock.losses, abs=tolerance)
        assert "tied weights summed hierarchically" in ours.lines[0]
        if FULL:  # a landing compares the orders in deepspeed/test_tied.py
            # With STOCK_ORDER, holmes adds in stock's order, and no digit differs.
            in_order, _ = train(checkout, two_clusters, *holmes_flags, **precision, env=STOCK_ORDER)
            assert in_order.losses == stock.losses
    else:
        # At most two numbers are added, which have only one order.
        assert ours.losses == stock.losses

    # The lines of holmes: none in stock's run; the first one names the clusters.
    assert not stock.lines
    assert "2 clusters" in ours.lines[0]
    if case.zero_stage == 3:
        assert len(ours.lines) == 2
        assert ours.lines[1].startswith("holmes: ZeRO 3 gathers")
    else:
        assert len(ours.lines) == 1

    check_bytes_sent(case, stock_sent, sent)


def check_bytes_sent(case: Case, stock_sent: dict, sent: dict) -> None:
    """Assert that holmes sends gradients between nodes of one cluster over their fast NICs.

    The script without holmes ("stock") sends everything over Ethernet, which connects all nodes.

    Args:
        stock_sent: By node and NIC, the MB sent without holmes.
        sent: By node and NIC, the MB sent with holmes.
    """
    all_are_data_parallel = case.data == 4  # the gradients of all four ranks are averaged
    for node, nics in sent.items():
        stock_ethernet = stock_sent[node]["eth0"]
        # fast() returns the MB that the node's InfiniBand or RoCE NIC sent.
        assert fast(stock_sent[node]) < 0.01
        if case.zero_stage == 3:
            # One group spans both clusters. holmes leaves DeepSpeed's own collectives on Ethernet.
            assert fast(nics) < 1
            assert nics["eth0"] > 100
        elif all_are_data_parallel:
            # One group spans both clusters. Its gradients are reduced inside each cluster first.
            assert fast(nics) > 1
            assert nics["eth0"] < 0.8 * stock_ethernet
        else:
            # Most bytes must cross between the clusters: GPT-2's tied embedding is large beside the other
            # tensors, whose hidden size is 64.
            smallest_share = 0.25 if case.is_tied_over_four_ranks else 0.02
            assert fast(nics) > smallest_share * stock_ethernet, (node, nics, stock_sent[node])

    if all_are_data_parallel:
        return
    stock_ethernet_total = sum(nics["eth0"] for nics in stock_sent.values())
    ethernet_total = sum(nics["eth0"] for nics in sent.values())
    spared = stock_ethernet_total - ethernet_total
    moved = sum(fast(nics) for nics in sent.values())  # MB on all fast NICs
    # Each MB on a fast NIC spares about one MB on Ethernet, but less for a tied embedding: its hierarchical
    # all-reduce sends E bytes on fast NICs and E / 2 on Ethernet, where stock sends E on Ethernet. With N
    # bytes of gradients in all, N + E are on fast NICs and N + E / 2 are spared. E <= N, so the ratio is at
    # least 3/4. The bounds leave some room.
    smallest_share = 0.7 if case.is_tied_over_four_ranks else 0.9
    assert spared > smallest_share * moved, (stock_sent, sent)


@full  # rows/test_rows.py exchanges checkpoints in each landing
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("zero", [0, 1])
def test_checkpoints_pass_between_stock_and_holmes(checkout, two_clusters, tmp_path, zero):
    """A job resumes from a checkpoint with exactly the losses of an uninterrupted run.

    The checkpoint is saved after step 3 without holmes ("stock") and resumed with holmes, and the other way
    round.
    """

    def run(*flags):
        # STOCK_ORDER: holmes adds gradients in stock's order, so that no digit of a loss differs.
        log, _ = train(
            checkout, two_clusters, *PIPELINE, *flags, steps=6, zero=zero, env=STOCK_ORDER
        )
        return log

    uninterrupted = run()
    flags_of = {"stock": (), "holmes": two_clusters.holmes}
    for saver, loader in (("stock", "holmes"), ("holmes", "stock")):
        checkpoint = str(tmp_path / saver)
        run(*flags_of[saver], "--save", checkpoint, "--save-interval", "3", "--exit-interval", "3")
        resumed = run(*flags_of[loader], "--load", checkpoint)
        expected = {step: loss for step, loss in uninterrupted.losses.items() if step > 3}
        assert resumed.losses == expected, (saver, loader)


#: Keeps Megatron from padding the vocabulary: ds_to_universal drops the trained values of padded rows, so
#: that the loss would change.
NO_PADDING = ("--make-vocab-size-divisible-by", "1")


def convert_as_advised(line: str, checkout, folder: Path) -> None:
    """Convert the checkpoint in `folder` to a universal one, with the command in holmes's message `line`."""
    command = re.search(
        r"python (-m deepspeed\.checkpoint\.ds_to_universal --input_folder \S+ --output_folder \S+?),",
        line,
    )
    assert command and str(folder) in command[1], line
    checkout.check([sys.executable, *command[1].split()])


@full  # rows/test_rows.py exchanges checkpoints in each landing
@pytest.mark.timeout(1200)
def test_another_split_is_refused_and_its_universal_checkpoint_goes_on(
    checkout, two_clusters, tmp_path, exhaustive
):
    """A job resumes with other layers per stage if the checkpoint is converted as holmes's message says.

    A job without holmes trains stages of 2 + 2 layers, then one with holmes 3 + 1, then one without holmes
    2 + 2 again. Before each conversion, a job with holmes refuses to load the checkpoint, and its message has
    the command that converts it. All losses are exactly those of an uninterrupted run.
    """
    flags = (*PIPELINE, *NO_PADDING, "--checkpoint-activations", "--checkpoint-num-layers", "2")
    holmes = (*two_clusters.holmes, "--holmes-partition")

    def run(*more):
        # Returns the losses by step. STOCK_ORDER: holmes adds gradients in the order of a job without it.
        log, _ = train(checkout, two_clusters, *flags, *more, steps=8, zero=1, env=STOCK_ORDER)
        return log.losses

    uninterrupted = run()
    stock = tmp_path / "stock"  # checkpoint of the job without holmes
    ours = tmp_path / "ours"  # checkpoint of the job with holmes

    # Without holmes, 2 + 2 layers: saved after step 3. A stage's modules are its layers, embedding and so on.
    run("--save", str(stock), "--save-interval", "3", "--exit-interval", "3")
    line = run_refused_job(
        checkout, two_clusters, *flags, "--holmes-partition", "3,1", "--load", str(stock), zero=1
    )
    assert "was saved with stages of 4+4 modules, this job has stages of 5+3 modules" in line
    convert_as_advised(line, checkout, stock)

    # With holmes, 3 + 1 layers (and other partitions): resumed, and saved after step 6.
    load = ("--load", str(stock), "--universal-checkpoint")
    after_step_3 = {step: loss for step, loss in uninterrupted.items() if step > 3}
    if exhaustive:
        for partition in ("balanced", "speed"):
            assert run(*holmes, partition, *load) == after_step_3, partition
        # Not exactly equal: with 4 stages there is one data-parallel rank, which adds the gradients of 8
        # micro-batches one after another. With 2 stages, two ranks add 4 each.
        four_stages = ("--pipeline-model-parallel-size", "4", *two_clusters.holmes)
        assert run(*four_stages, *load) == pytest.approx(after_step_3, abs=1e-5)
    losses = run(
        *holmes, "3,1", *load, "--save", str(ours), "--save-interval", "6", "--exit-interval", "6"
    )
    assert losses == {step: loss for step, loss in uninterrupted.items() if 3 < step <= 6}

    # Without holmes, 2 + 2 layers again: resumed.
    line = run_refused_job(checkout, two_clusters, *flags, "--load", str(ours), zero=1)
    assert "was saved with stages of 5+3 modules, this job has stages of 4+4 modules" in line
    convert_as_advised(line, checkout, ours)
    losses = run("--load", str(ours), "--universal-checkpoint")
    assert losses == {step: loss for step, loss in uninterrupted.items() if step > 6}


@full  # deepspeed/test_overlap.py compares losses in each landing
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("zero, dtype", [(1, "fp32"), (0, "fp32"), (0, "bf16")])
def test_overlapped_reduction_leaves_the_losses(checkout, two_clusters, zero, dtype):
    """Reducing gradients during backward passes gives exactly the losses of the job without holmes."""
    stock, _ = train(checkout, two_clusters, *PIPELINE, steps=8, zero=zero, dtype=dtype)
    holmes_flags = (*two_clusters.holmes, *KEEP_PLAN, "--holmes-overlap", "on")
    ours, _ = train(
        checkout,
        two_clusters,
        *PIPELINE,
        *holmes_flags,
        steps=8,
        zero=zero,
        dtype=dtype,
        env=STOCK_ORDER,
    )
    assert ours.losses == stock.losses
    # A second line would say why the reduction is not overlapped.
    assert len(ours.lines) == 1 and "overlap" in ours.lines[0], ours.lines


#: Launcher -> the start of its command line on each node, which the script and its arguments follow.
#: srun and mpirun are emulated by the environment variables that they set.
LAUNCHERS = {
    "deepspeed": "{python} -m deepspeed.launcher.launch --world_info={world} --node_rank=$NODE_RANK"
    " --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT",
    "srun": "env SLURM_STEP_ID=0 SLURM_PROCID=$RANK SLURM_NTASKS=$WORLD_SIZE SLURM_LOCALID=$LOCAL_RANK"
    " SLURM_NTASKS_PER_NODE=1 LOCAL_SIZE=1 {python}",
    "mpirun": "env OMPI_COMM_WORLD_RANK=$RANK OMPI_COMM_WORLD_SIZE=$WORLD_SIZE "
    "OMPI_COMM_WORLD_LOCAL_RANK=$LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE=1 LOCAL_SIZE=1 {python}",
}
#: Variables by which torchrun numbers the processes; the lab sets them, the other launchers do not.
TORCHRUN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
)


def run_with_launcher(checkout, two_clusters, launcher, nodes, *arguments):
    """Start a script on some of the emulated nodes, as a given launcher would start it.

    Args:
        launcher: A key of LAUNCHERS, e.g. "srun".
        nodes: Names of the nodes on which the script runs. The other nodes run nothing.
        arguments: The script and its arguments.

    Returns:
        The RunResult, which has the status and the outputs.
    """
    # deepspeed.launcher.launch takes its nodes, with their GPUs, as base64 of JSON.
    world = base64.urlsafe_b64encode(json.dumps({node: [0] for node in nodes}).encode()).decode()
    start = LAUNCHERS[launcher].format(python=sys.executable, world=world)
    # A shell command that runs on every emulated node: it ends at once on nodes that are not in `nodes`.
    is_chosen = " || ".join(f"[ $HOLMES_LAB_NODE = {node} ]" for node in nodes)
    unset = " ".join(f"-u {name}" for name in TORCHRUN)  # arguments of `env`
    command = f"{{ {is_chosen}; }} || exit 0; exec env {unset} {start} {' '.join(arguments)}"
    return two_clusters.run("sh", "-c", command, env=checkout.env, cwd=checkout.folder, timeout=300)


@pytest.mark.timeout(1200)
@full
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_started_by_other_launchers(checkout, two_clusters, launcher):
    """Under each launcher, holmes renumbers the ranks by cluster, and the losses are those without holmes."""
    stock, _ = train(checkout, two_clusters, *PIPELINE, steps=3)
    arguments = checkout.arguments(3, *PIPELINE, *two_clusters.holmes)
    result = run_with_launcher(checkout, two_clusters, launcher, two_clusters.order, *arguments)
    ours = read_log(result)
    assert ours.losses == pytest.approx(stock.losses, abs=OTHER_ORDER)
    assert len(ours.lines) == 1 and "ranks renumbered" in ours.lines[0], ours


def run_refused_job(checkout, two_clusters, *flags, env=None, **more):
    """Run a training job that holmes must refuse, and return the message that it prints.

    Asserted are status 2, no traceback, and a single message on all ranks together.
    """
    steps = 2
    command = checkout.arguments(steps, *flags, *two_clusters.holmes, **more)
    result = checkout.run(two_clusters, *command, env=env, timeout=240)
    text = "\n".join(result.outputs.values())
    assert result.returncode == 2, text[-6000:]
    assert "Traceback" not in text, text[-6000:]
    # Two other lines of holmes are no refusal: the clusters and the layers of each stage, which are printed
    # before the checkpoint is read.
    messages = [
        line
        for line in holmes_lines(result)
        if " clusters: " not in line and "stages begin" not in line
    ]
    assert len(messages) == 1, messages
    return messages[0]


@pytest.mark.timeout(600)
def test_flags_in_its_own_help_and_near_misses(checkout, two_clusters):
    """pretrain_gpt.py --help lists the flags of holmes, and a misspelt flag is refused with the right one."""
    steps = 2
    command = checkout.arguments(steps, *PIPELINE, *two_clusters.holmes)

    result = checkout.run(two_clusters, *command, "--help", timeout=240)
    assert result.returncode == 0, result.outputs
    text = result.outputs[0]
    if "--tensor-model-parallel-size" not in text:  # another rank has printed the help
        text = "".join(result.outputs.values())
    assert "--holmes-cluster" in text
    assert "holmes:" in text
    assert "Percent of rotary dimension" in text  # the help of a flag of Megatron's

    result = checkout.run(two_clusters, *command, "--holms-plan", "x", timeout=240)
    text = "".join(result.outputs.values())
    assert result.returncode == 2
    assert "Traceback" not in text
    assert (
        "error: unrecognized arguments: --holms-plan x; --holms-plan: did you mean --holmes-plan?"
        in text
    )


@pytest.mark.timeout(600)
def test_a_ds_config_that_contradicts_the_plan(checkout, two_clusters):
    """If the ds_config has another number of stages than the flags, the job is refused.

    The message names the file and its key.
    """
    config = checkout.config(pipeline={"stages": 4})
    line = run_refused_job(checkout, two_clusters, *PIPELINE, config=config)
    assert str(config) in line and "key 'pipeline.stages' is 4, but the plan has 2" in line


@pytest.mark.timeout(600)
def test_a_hostfile_that_does_not_match_the_clusters(checkout, two_clusters, tmp_path):
    """If a host is in no cluster of the cluster.toml, the job ends with one line that names the host.

    The processes are started as `deepspeed --hostfile` starts them, by deepspeed.launcher.launch.
    """
    file = tmp_path / "c.toml"
    # Without host b1, which the job uses.
    file.write_text(CLUSTER.read_text().replace("b[0-1]", "b0"))
    steps = 2
    arguments = checkout.arguments(steps, *NO_PIPELINE, "--holmes", "--holmes-cluster", str(file))
    result = run_with_launcher(checkout, two_clusters, "deepspeed", two_clusters.order, *arguments)
    lines = [line for output in result.outputs.values() for line in output.splitlines()]
    messages = [line for line in lines if line.startswith("holmes:")]
    assert result.returncode != 0, result.outputs
    assert len(messages) == 1, result.outputs
    assert "hostfile has 4 hosts" in messages[0]
    assert "host 'b1' is in no cluster" in messages[0]
