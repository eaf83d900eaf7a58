"""Compares predicted steps and memory with those that were published for large runs on real GPUs.

    python benchmarks/published.py [--json FILE] [--cases NAME,...]

No GPU is needed. `holmes plan` reads the run's command line, and predicts the step of the framework's own
schedule, without holmes, by the closed form.

The speed of the kernels is the only input that is not in the publications. It is the default of
`holmes plan`: for all runs on A100s 180 TFLOP/s, 58 % of the peak, chosen once for all of them.
Publications give end-to-end figures such as 150 TFLOP/s. These are lower, because they include communication
and pipeline bubbles. The interconnect is that of the publication: 8 x 200 Gb/s for NVIDIA's Selene, 4 x 100
Gb/s for Jean Zay (BLOOM).

Sources:

    SC21     Narayanan et al. 2021, arXiv 2104.04473, table 1: end-to-end TFLOP/s, from which equation 3 of
             the paper gives the step. Micro-batch sizes and chunks are not published; small ones are assumed
    MLSys23  Korthikanti et al. 2022, arXiv 2205.05198, table 5: seconds of an iteration
    BLOOM    bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md: seconds of the second
             iteration, and memory read with nvidia-smi on the fullest node
    NeoX     Black et al. 2022, arXiv 2204.06745: 117 TFLOP/s for each of 96 GPUs
    OPT      Zhang et al. 2022, arXiv 2205.01068: 147 TFLOP/s for each of 992 GPUs
    titan    pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3 (torch.compile)
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from harness import Row, chosen_cases, finish, parser

from holmes_ext.cluster.gpus import KNOWN_GPUS
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import parse_spec
from holmes_ext.options import Options
from holmes_ext.patches.deepspeed.optimizers import TrainingTypes, state_of_mode
from holmes_ext.patches.megatron.command_line.describe import describe
from holmes_ext.patches.traits import engine_of
from holmes_ext.plan.cost.model import Model, on_clusters
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.engine import rules_of
from holmes_ext.plan.shape import shape_of
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.search.as_plan import layout_candidate
from holmes_ext.planner.search.result import SearchResult

#: GPU -> FLOP/s that its kernels reach while they run, without communication: the defaults of holmes.
KERNEL_FLOPS = {
    name: KNOWN_GPUS[name.partition("-")[0]].flops for name in ("A100", "A100-SXM4-40GB", "H100")
}
#: Largest relative error of a step that counts as good.
WITHIN = 0.25
GIB = 2**30
GPUS_OF_NODE = 8
#: Release of DeepSpeed that sums bf16 gradients as the branch that trained BLOOM did.
DEEPSPEED_OF_BLOOM = "0.14.4"


@dataclass(frozen=True)
class PublishedRun:
    """Published training run: its flags, its step time, and its memory if that was published."""

    name: str
    flags: str  # of Megatron-LM or Megatron-DeepSpeed
    gpus: int
    step_s: float
    gpu: str = "A100"
    rate: str = "1600Gb/s"  # of all NICs of a node together
    ds_config: str = ""  # content; "" for Megatron-LM
    memory_gib: float = 0.0  # nvidia-smi's on the fullest GPU; 0: not published
    stage_layers: tuple[int, ...] = ()  # (): as the framework divides them


class Prediction(NamedTuple):
    """Predicted step and memory of a run."""

    parameters: int
    step_s: float
    memory_bytes: float  # of the fullest stage


def predict(run: PublishedRun) -> Prediction:
    """Return the step time and memory that `holmes plan` predicts for a published run.

    The framework alone ran the job, with its own schedule and reductions, so the prediction is that of
    the job without holmes. KERNEL_FLOPS has the assumed speed of the GPUs.
    """
    spec = parse_spec(
        f"""
        version = 2
        [ethernet]
        rate = "100Gb/s"
        [[cluster]]
        name = "published"
        kind = "ib"
        rate = "{run.rate}"
        nodes = ["n[0001-{run.gpus // GPUS_OF_NODE:04d}]"]
        processes = {GPUS_OF_NODE}
        gpu = "{run.gpu}"
        gpu_flops = {KERNEL_FLOPS[run.gpu]}
        """
    )
    site = site_from_spec(spec)
    with tempfile.TemporaryDirectory() as folder:
        words = run.flags.split()
        if run.ds_config:
            path = Path(folder) / "ds_config.json"
            path.write_text(run.ds_config)
            words += ["--deepspeed", "--deepspeed_config", str(path)]
        command_line = describe(words)
    assert command_line.model is not None, command_line.trouble
    model = on_clusters(_as_released(command_line.model, run), spec)
    sizes = (command_line.sizes or Sizes()).complete(site.world_size, GPUS_OF_NODE)
    engine = engine_of(command_line.framework)
    # A SearchResult without candidates describes a job: here the published one.
    job = SearchResult(
        Network(site),
        model,
        model.global_batch,
        rules=rules_of(engine, Options()),
        engine=engine,
        stock_overlap=command_line.overlap,
        gather_overlap=command_line.gather_overlap,
    )
    shape = shape_of(model, sizes, command_line.zero, command_line.virtual)
    layout = layout_candidate(job, sizes, shape, split=run.stage_layers)
    _, plan_without_holmes = job.stock(shape, layout.split)
    return Prediction(
        parameters=model.parameters,
        step_s=plan_without_holmes.formula_s,  # by the closed form, not simulated
        memory_bytes=layout.peak_bytes,
    )


def _as_released(model: Model, run: PublishedRun) -> Model:
    """Return the model with the bytes per parameter that DeepSpeed kept at the time of the run.

    describe() counts them for the DeepSpeed that is installed here, and releases differ. BLOOM ran on a
    branch of DeepSpeed, and the release DEEPSPEED_OF_BLOOM sums bf16 gradients as that branch did. This
    release is used for all runs with a ds_config. A run of Megatron-LM is returned unchanged.
    """
    if not run.ds_config:
        return model
    states = state_of_mode(TrainingTypes(model.precision), DEEPSPEED_OF_BLOOM)
    return replace(model, state_of_mode=states)


def _gpt(
    layers: int,
    hidden: int,
    heads: int,
    tensor: int,
    pipeline: int,
    global_batch: int,
    micro_batch: int,
    other_flags: str,
    vocabulary: int = 51200,
) -> str:
    """Return the flags of a GPT with 2048 tokens in a sequence, and attention without a fused kernel.

    Args:
        layers: Number of transformer blocks.
        hidden: Hidden size.
        heads: Number of attention heads.
        tensor: Tensor-parallel size.
        pipeline: Number of pipeline stages.
        global_batch: Sequences of a step.
        micro_batch: Sequences of a micro-batch.
        other_flags: Further flags, such as "--fp16".
        vocabulary: Vocabulary size, with its padding.
    """
    return (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length 2048 "
        f"--max-position-embeddings 2048 --padded-vocab-size {vocabulary} --transformer-impl local "
        f"--micro-batch-size {micro_batch} --global-batch-size {global_batch} "
        f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline} {other_flags}"
    )


def _step_of(
    layers: int,
    hidden: int,
    global_batch: int,
    gpus: int,
    teraflops: float,
    vocabulary: int = 51200,
) -> float:
    """Return the seconds of a step from published TFLOP/s, by equation 3 of arXiv 2104.04473.

    The equation counts every block's forward pass twice, because it is recomputed.

    Args:
        layers: Number of transformer blocks.
        hidden: Hidden size.
        global_batch: Sequences of a step, of 2048 tokens each.
        gpus: Number of GPUs.
        teraflops: TFLOP/s of each GPU, end to end.
        vocabulary: Vocabulary size.
    """
    tokens_of_sequence = 2048
    blocks_flops = 96 * global_batch * tokens_of_sequence * layers * hidden**2
    attention_part = tokens_of_sequence / (6 * hidden)
    output_part = vocabulary / (16 * layers * hidden)
    return blocks_flops * (1 + attention_part + output_part) / (gpus * teraflops * 1e12)


def _sc21() -> Iterator[PublishedRun]:
    """Yield the runs of Megatron-LM in table 1 of Narayanan et al. (SC21, arXiv 2104.04473).

    The table shows weak scaling: the model grows with the number of GPUs, from 1.7B parameters on 32 to
    1T on 3072.
    """
    # Parameters, layers, hidden size, heads, tensor, pipeline, GPUs, batch, TFLOP/s, micro-batch (assumed).
    table = (
        ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137, 8),
        ("3.6B", 30, 3072, 32, 2, 1, 64, 512, 138, 8),
        ("7.5B", 36, 4096, 32, 4, 1, 128, 512, 142, 8),
        ("18B", 40, 6144, 48, 8, 1, 256, 1024, 135, 8),
        ("39B", 48, 8192, 64, 8, 2, 512, 1536, 138, 4),
        ("76B", 60, 10240, 80, 8, 4, 1024, 1792, 140, 2),
        ("145B", 80, 12288, 96, 8, 8, 1536, 2304, 148, 2),
        ("310B", 96, 16384, 128, 8, 16, 1920, 2160, 155, 1),
        ("530B", 105, 20480, 128, 8, 35, 2520, 2520, 163, 1),
        ("1T", 128, 25600, 160, 8, 64, 3072, 3072, 163, 1),
    )
    for size, layers, hidden, heads, tensor, pipeline, gpus, batch, teraflops, micro_batch in table:
        yield PublishedRun(
            name=f"SC21 {size}, {gpus} A100",
            flags=_gpt(
                layers=layers,
                hidden=hidden,
                heads=heads,
                tensor=tensor,
                pipeline=pipeline,
                global_batch=batch,
                micro_batch=micro_batch,
                other_flags="--fp16 --recompute-granularity full",
            ),
            gpus=gpus,
            step_s=_step_of(layers, hidden, batch, gpus, teraflops),
        )


def _mlsys23() -> Iterator[PublishedRun]:
    """Yield the runs of Megatron-LM in table 5 of Korthikanti et al. (MLSys23, arXiv 2205.05198).

    Each model was trained in two ways: with full recomputation of the activations, and with selective
    recomputation (of the attention scores only) and sequence parallelism.
    """
    # Parameters, layers, hidden size, heads, pipeline, GPUs, batch, micro-batch, chunks, seconds with
    # full recomputation, seconds with selective recomputation.
    table = (
        ("22B", 48, 6144, 64, 1, 8, 4, 4, 1, 1.42, 1.10),
        ("175B", 96, 12288, 96, 8, 64, 64, 1, 3, 18.13, 13.75),
        ("530B", 105, 20480, 128, 35, 280, 280, 1, 3, 49.05, 37.83),
        ("1T", 128, 25600, 160, 64, 512, 512, 1, 1, 94.42, 71.49),
    )
    for (
        size,
        layers,
        hidden,
        heads,
        pipeline,
        gpus,
        batch,
        micro_batch,
        chunks,
        full_s,
        selective_s,
    ) in table:
        chunk_flags = ""
        if chunks > 1:
            chunk_flags = f"--num-virtual-stages-per-pipeline-rank {chunks}"
        step_and_flags = {
            "full": (full_s, "--fp16 --recompute-granularity full"),
            "selective": (
                selective_s,
                "--fp16 --recompute-granularity selective --sequence-parallel",
            ),
        }
        for recompute, (step_s, recompute_flags) in step_and_flags.items():
            yield PublishedRun(
                name=f"MLSys23 {size}, {gpus} A100, {recompute}",
                flags=_gpt(
                    layers=layers,
                    hidden=hidden,
                    heads=heads,
                    tensor=8,
                    pipeline=pipeline,
                    global_batch=batch,
                    micro_batch=micro_batch,
                    other_flags=f"{recompute_flags} {chunk_flags}",
                ),
                gpus=gpus,
                step_s=step_s,
            )


def _bloom() -> Iterator[PublishedRun]:
    """Yield the configurations that BigScience measured on 384 A100s of 80 GB to choose that of BLOOM-176B.

    They differ in the precision, the shape of the model and the parallel sizes. The first configuration was
    chosen: BLOOM was trained with it.
    """
    # Precision, layers, hidden size, heads, tensor, pipeline, micro-batch, GiB, seconds.
    table = (
        ("bf16", 70, 14336, 112, 4, 12, 2, 59, 104.50),
        ("bf16", 70, 14336, 64, 4, 12, 4, 73, 102.27),
        ("bf16", 70, 14336, 64, 8, 12, 2, 40, 121.63),
        ("bf16", 82, 13312, 64, 4, 12, 2, 63, 104.45),
        ("bf16", 82, 13312, 64, 8, 12, 4, 52, 111.79),
        ("bf16", 106, 12288, 64, 4, 12, 2, 67, 116.54),
        ("bf16", 100, 12288, 64, 8, 6, 4, 72, 120.96),
        ("fp16", 72, 14336, 64, 4, 12, 2, 44, 110.48),
        ("fp16", 72, 14336, 64, 8, 6, 4, 55, 114.11),
        ("fp16", 72, 14336, 64, 8, 12, 4, 49, 117.07),
    )
    for precision, layers, hidden, heads, tensor, pipeline, micro_batch, gib, step_s in table:
        # The runs in bf16 had ZeRO 0 in ds_config. There DeepSpeed makes its BF16_Optimizer, which shards
        # optimizer states all the same. The runs in fp16 had ZeRO 1.
        zero = 0 if precision == "bf16" else 1
        config = {precision: {"enabled": True}, "zero_optimization": {"stage": zero}}
        stage_layers = ()
        if precision == "bf16":  # these had --pp-partition-method "type:transformer|embedding"
            stage_layers = _with_embeddings_as_layers(layers, pipeline)
        yield PublishedRun(
            name=f"BLOOM {layers} x {hidden}, {precision}, TP {tensor} PP {pipeline} MB {micro_batch}",
            flags=_gpt(
                layers=layers,
                hidden=hidden,
                heads=heads,
                tensor=tensor,
                pipeline=pipeline,
                global_batch=2048,
                micro_batch=micro_batch,
                other_flags=f"--{precision} --checkpoint-activations --position-embedding-type alibi",
                vocabulary=250880,
            ),
            gpus=384,
            step_s=step_s,
            rate="400Gb/s",
            ds_config=json.dumps(config),
            memory_gib=gib,
            stage_layers=stage_layers,
        )


def _with_embeddings_as_layers(layers: int, pipeline: int) -> tuple[int, ...]:
    """Return the transformer blocks of each stage if embedding and output layer count as a layer each.

    All stages get the same number of layers. The embedding is a layer of the first stage, and the output
    layer is one of the last stage, so these two stages have a block less. Example: 70 blocks on 12 stages
    are 72 layers, 6 a stage, so the result is (5, 6, 6, ..., 6, 5).
    """
    layers_of_stage = (layers + 2) // pipeline
    middle_stages = [layers_of_stage] * (pipeline - 2)
    return (layers_of_stage - 1, *middle_stages, layers_of_stage - 1)


def _neox_opt_and_llama() -> Iterator[PublishedRun]:
    """Yield the runs of GPT-NeoX 20B, OPT 175B and Llama 3.1 8B.

    Their sources are arXiv 2204.06745, arXiv 2205.01068, and torchtitan's page of benchmarks ("titan" in
    the name of a run). The papers give TFLOP/s for each GPU, and torchtitan gives tokens a second.
    """
    yield PublishedRun(
        name="GPT-NeoX 20B, 96 A100",
        flags=_gpt(
            layers=44,
            hidden=6144,
            heads=64,
            tensor=2,
            pipeline=4,
            global_batch=1536,
            micro_batch=4,
            other_flags="--fp16 --checkpoint-activations --use-rotary-position-embeddings "
            "--untie-embeddings-and-output-weights",
            vocabulary=50432,
        ),
        gpus=96,
        step_s=_step_of(
            layers=44, hidden=6144, global_batch=1536, gpus=96, teraflops=117, vocabulary=50432
        ),
        gpu="A100-SXM4-40GB",
        rate="800Gb/s",
        ds_config=json.dumps({"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}),
    )
    yield PublishedRun(
        name="OPT 175B, 992 A100",
        flags=_gpt(
            layers=96,
            hidden=12288,
            heads=96,
            tensor=8,
            pipeline=1,
            global_batch=992,
            micro_batch=8,
            other_flags="--fp16 --recompute-granularity full --use-torch-fsdp2",
            vocabulary=50272,
        ),
        gpus=992,
        step_s=_step_of(
            layers=96, hidden=12288, global_batch=992, gpus=992, teraflops=147, vocabulary=50272
        ),
    )
    llama = (
        "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention "
        "--num-query-groups 8 --ffn-hidden-size 14336 --swiglu --disable-bias-linear --seq-length 8192 "
        "--use-rotary-position-embeddings --untie-embeddings-and-output-weights "
        "--padded-vocab-size 128256 --micro-batch-size 2 --bf16 --use-torch-fsdp2"
    )
    sequence, micro_batch = 8192, 2
    for gpus, tokens_per_s in ((8, 6667), (128, 6514)):  # tokens a second on each GPU
        yield PublishedRun(
            name=f"titan Llama 3.1 8B, {gpus} H100",
            flags=f"{llama} --global-batch-size {micro_batch * gpus}",
            gpus=gpus,
            step_s=sequence * micro_batch / tokens_per_s,
            gpu="H100",
            rate="3200Gb/s",
        )


#: All runs, by name.
RUNS = {run.name: run for run in (*_sc21(), *_mlsys23(), *_bloom(), *_neox_opt_and_llama())}


def rows_of(run: PublishedRun) -> Iterator[Row]:
    """Yield the rows of a run: published and predicted step, its error, and memory if it was published."""
    predicted = predict(run)
    yield _row(run.name, "published step", run.step_s, "s")
    yield _row(run.name, "predicted step", predicted.step_s, "s")
    yield _row(run.name, "error", predicted.step_s / run.step_s - 1, "of the published")
    if run.memory_gib:
        yield _row(run.name, "published memory", run.memory_gib, "GiB")
        yield _row(run.name, "predicted memory", predicted.memory_bytes / GIB, "GiB")


def _row(case: str, metric: str, value: float, unit: str, target: str = "") -> Row:
    """Return the row of a single value that was published or computed: nothing ran here.

    Args:
        case: Name of the run.
        metric: Name of the value.
        value: The value.
        unit: Unit of the value.
        target: A bound such as "<= 0.25"; "" if there is none.
    """
    # emulated: whether a lab imitated the compute of a job that ran.
    return Row.of(case, metric, value, unit, spread=(value, value), emulated=False, target=target)


def main() -> int:
    """Predict the chosen runs, print a table, and return the exit status.

    The status is 1 if the step of a run differs by more than WITHIN from the published step, else 0.
    """
    arguments = parser("Compare predictions with published runs.").parse_args()
    names = chosen_cases(arguments.cases, RUNS)
    rows = [row for name in names for row in rows_of(RUNS[name])]
    errors = [abs(row.value) for row in rows if row.metric == "error"]
    rows.append(
        _row(
            f"{len(errors)} published runs",
            "largest error of a step",
            value=max(errors),
            unit="of the published",
            target=f"<= {WITHIN}",
        )
    )
    return finish(rows, arguments.json, "Predicted and published steps")


if __name__ == "__main__":
    sys.exit(main())
