"""Every flag and key that is read moves the prediction the right way.

MOVES has one row for each. The other flags and keys are named.
"""

import json
import tracemalloc

import clusters
import pytest

from holmes_ext.patches.megatron.command_line.describe import describe
from holmes_ext.patches.megatron.command_line.flags import (
    FLAG_PREFIXES_WITHOUT_EFFECT,
    KEY_PREFIXES_WITHOUT_EFFECT,
    REASON_NOT_COUNTED,
    SETTING_OF_FLAG,
    SETTING_OF_KEY,
    VALUES_WITHOUT_EFFECT,
)
from holmes_ext.patches.megatron.command_line.refusals import refusals
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.engine import Rules
from holmes_ext.plan.shape import shape_of
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.search.as_plan import layout_candidate
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.simulated import timed
from holmes_ext.planner.search.stock import causes, stock_like

SITE = clusters.site("a ib 100Gb/s a[0-1]", "b roce 50Gb/s b[0-1]", ethernet="10Gb/s", processes=4)
GPT = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --micro-batch-size 2"
    " --global-batch-size 64 --vocab-size 50257 --pipeline-model-parallel-size 2 "
    "--tensor-model-parallel-size 2"
)
BF16, ONE = f"{GPT} --bf16", GPT.replace("--pipeline-model-parallel-size 2", "") + " --bf16"
MOE, DEEPSPEED = f"{BF16} --num-experts 8", f"{BF16} --deepspeed"
LATENT = f"{BF16} --multi-latent-attention"
NO_VOCABULARY = BF16.replace("--vocab-size 50257", "")
#: Two names of a number are refused, so the row's flag replaces the number itself.
NO_LAYERS = BF16.replace("--num-layers 8", "--encoder-num-layers 8")
NO_SEQUENCE = BF16.replace("--seq-length 512", "--encoder-seq-length 512")
#: Much to compute in a micro-batch: else nothing can be hidden under it.
LONG = f"{ONE} --num-layers 4 --hidden-size 4096 --seq-length 4096 --global-batch-size 16"
DS_MOE = f"{MOE} --deepspeed"

#: (what is there, what is added, which figure it moves, and where to)
MOVES = [
    (BF16, "--pipeline-model-parallel-size 4", "memory", "down"),
    (BF16, "--tensor-model-parallel-size 4", "memory", "down"),
    (BF16, "--context-parallel-size 2", "memory", "down"),
    (DEEPSPEED, "--ds-sequence-parallel-size 2", "memory", "down"),
    (MOE, "--expert-model-parallel-size 2", "memory", "down"),
    (DS_MOE, "--moe-expert-parallel-size 2", "memory", "down"),
    (BF16, "--no-pipeline-parallel", "memory", "up"),
    (BF16, "--use-tp-pp-dp-mapping", "reduce_across", "up"),
    (BF16, "--num-layers 16", "step", "up"),
    (BF16, "--hidden-size 2048", "step", "up"),
    (f"{BF16} --transformer-impl local", "--num-attention-heads 32", "memory", "up"),
    (BF16, "--seq-length 1024", "step", "up"),
    (BF16, "--ffn-hidden-size 8192", "step", "up"),
    (BF16, "--kv-channels 128", "step", "up"),
    (f"{BF16} --group-query-attention", "--num-query-groups 4", "parameters", "down"),
    (f"{BF16} --num-query-groups 4", "--group-query-attention", "parameters", "down"),
    (DEEPSPEED, "--num-key-value-heads 4", "parameters", "down"),
    (BF16, "--max-position-embeddings 4096", "parameters", "up"),
    (BF16, "--vocab-size 100000", "parameters", "up"),
    (BF16, "--padded-vocab-size 100000", "parameters", "up"),
    (BF16, "--make-vocab-size-divisible-by 8192", "parameters", "up"),
    (BF16, "--no-pad-vocab-size", "parameters", "down"),
    (BF16, "--pad-vocab-size-to 250880", "parameters", "up"),
    (NO_VOCABULARY, "--tokenizer-model /models/Meta-Llama-3-8B", "parameters", "up"),
    (NO_VOCABULARY, "--tokenizer-name-or-path bigscience/bloom", "parameters", "up"),
    (NO_VOCABULARY, "--patch-tokenizer-type LLama3Tokenizer", "parameters", "up"),
    (f"pretrain_bert.py {NO_VOCABULARY}", "--tokenizer-type GPT2BPETokenizer", "parameters", "up"),
    (NO_LAYERS, "--encoder-num-layers 16", "step", "up"),
    (NO_SEQUENCE, "--encoder-seq-length 1024", "step", "up"),
    (BF16, "--decoder-seq-length 1024", "step", "up"),
    (BF16, "--glu-activation swiglu", "parameters", "up"),
    (BF16, "--multi-latent-attention", "parameters", "up"),
    (LATENT, "--q-lora-rank 64", "parameters", "down"),
    (LATENT, "--kv-lora-rank 64", "parameters", "up"),
    (LATENT, "--qk-head-dim 256", "parameters", "up"),
    (LATENT, "--qk-nope-head-dim 256", "parameters", "up"),
    (LATENT, "--qk-rope-head-dim 128", "step", "up"),
    (LATENT, "--qk-pos-emb-head-dim 128", "step", "up"),
    (LATENT, "--v-head-dim 256", "step", "up"),
    (f"{BF16} --ffn-hidden-size 4096", "--swiglu", "step", "up"),
    (BF16, "--quick-geglu", "step", "up"),
    (BF16, "--geglu", "step", "up"),
    (BF16, "--disable-bias-linear", "parameters", "down"),
    (BF16, "--untie-embeddings-and-output-weights", "parameters", "up"),
    (BF16, "--position-embedding-type rope", "parameters", "down"),
    (BF16, "--use-rotary-position-embeddings", "parameters", "down"),
    (BF16, "--no-position-embedding", "parameters", "down"),
    (BF16, "--num-experts 8", "parameters", "up"),
    (MOE, "--moe-router-topk 4", "step", "up"),
    (DS_MOE, "--topk 2", "step", "up"),
    (MOE, "--moe-ffn-hidden-size 8192", "step", "up"),
    (MOE, "--moe-shared-expert-intermediate-size 4096", "step", "up"),
    (MOE, "--shared-moe-ffn-hidden-size 4096", "step", "up"),
    (MOE, "--moe-layer-freq ([0]+[1]*3)*2", "parameters", "down"),
    (DS_MOE, "--expert-interval 4", "parameters", "down"),
    (DS_MOE, "--mlp-type residual", "step", "up"),
    (BF16, "--micro-batch-size 4", "memory", "up"),
    (BF16, "--batch-size 4", "memory", "up"),
    (BF16, "--global-batch-size 128", "step", "up"),
    (GPT, "--bf16", "send_across", "down"),
    (GPT, "--fp16", "memory", "down"),
    (BF16, "--grad-reduce-in-bf16", "memory", "down"),
    (f"{GPT} --fp16", "--accumulate-allreduce-grads-in-fp32", "memory", "up"),
    (BF16, "--main-grads-dtype bf16", "memory", "down"),
    (BF16, "--main-params-dtype fp16", "memory", "down"),
    (BF16, "--exp-avg-dtype bf16", "memory", "down"),
    (BF16, "--exp-avg-sq-dtype fp8", "memory", "down"),
    (BF16, "--optimizer sgd", "memory", "down"),
    (BF16, "--optimizer-cpu-offload", "memory", "down"),
    (f"{BF16} --optimizer-cpu-offload", "--optimizer-offload-fraction 0.5", "memory", "up"),
    (f"{DEEPSPEED} --zero-stage 1", "--cpu-optimizer", "memory", "down"),
    (BF16, "--sequence-parallel", "memory", "down"),
    # tensor ranks share out what crosses without it too
    (BF16, "--sequence-parallel", "send_across", "same"),
    (BF16, "--recompute-granularity full", "memory", "down"),
    (LONG, "--recompute-granularity full", "step", "up"),
    (f"{BF16} --transformer-impl local", "--recompute-granularity selective", "memory", "down"),
    (f"{BF16} --transformer-impl local", "--recompute-activations", "memory", "down"),
    (BF16, "--checkpoint-activations", "memory", "down"),
    (BF16, "--activations-checkpoint-method uniform", "memory", "down"),
    (BF16, "--transformer-impl local", "memory", "up"),
    (BF16, "--attention-backend unfused", "memory", "up"),
    *(
        (DEEPSPEED, f"--use-flash-attn{kind}", "memory", "down")
        for kind in ("", "-v1", "-v2", "-triton", "-builder")
    ),
    (BF16, "--use-distributed-optimizer", "memory", "down"),
    (ONE, "--use-torch-fsdp2", "memory", "down"),
    (
        f"{ONE} --data-parallel-sharding-strategy optim_grads",
        "--use-megatron-fsdp",
        "memory",
        "down",
    ),
    (f"{ONE} --data-parallel-sharding-strategy optim_grads", "--use-custom-fsdp", "memory", "down"),
    (
        f"{ONE} --use-megatron-fsdp",
        "--data-parallel-sharding-strategy optim_grads_params",
        "memory",
        "down",
    ),
    (DEEPSPEED, "--zero-stage 1", "memory", "down"),
    (LONG, "--overlap-grad-reduce", "stock", "down"),
    (BF16, "--overlap-grad-reduce", "stock", "moves"),  # of the first stage alone
    (f"{BF16} --use-distributed-optimizer", "--overlap-param-gather", "step", "down"),
    (BF16, "--num-virtual-stages-per-pipeline-rank 2", "closed form", "moves"),
    (BF16, "--num-layers-per-virtual-pipeline-stage 2", "closed form", "moves"),
    (BF16, "--decoder-first-pipeline-num-layers 2", "memory of the first", "down"),
    (BF16, "--decoder-last-pipeline-num-layers 2", "memory of the last", "down"),
    (
        f"{BF16} --num-layers 7",
        "--account-for-embedding-in-pipeline-split",
        "memory of the first",
        "down",
    ),
    (
        f"{BF16} --num-layers 10 --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split",
        "--account-for-loss-in-pipeline-split",
        "memory of the first",
        "down",
    ),
    (BF16, "--pipeline-model-parallel-layout Et*2|t*6,L", "memory of the first", "down"),
    (BF16, "--deepspeed", "gradient width", "down"),
]
#: (ds_config, key and value added, figure, where to)
BASE = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}
KEYS = [
    ("train_batch_size", 128, "step", "up"),
    ("train_micro_batch_size_per_gpu", 4, "memory", "up"),
    ("gradient_accumulation_steps", 16, "step", "up"),
    ("bf16.enabled", False, "memory", "up"),
    ("bfloat16.enabled", True, "same", "same"),
    ("fp16.enabled", True, "same", "same"),
    ("communication_data_type", "fp32", "gradient width", "up"),
    ("data_types.grad_accum_dtype", "fp32", "memory", "up"),
    ("optimizer.type", "SGD", "memory", "down"),
    ("zero_optimization.stage", 1, "memory", "down"),
    ("zero_optimization.overlap_comm", True, "stock", "down"),
    ("zero_optimization.offload_optimizer.device", "cpu", "memory", "down"),
    ("zero_optimization.cpu_offload", True, "memory", "down"),
    ("pipeline.stages", 4, "memory", "down"),
    ("pipeline.activation_checkpoint_interval", 1, "memory", "down"),
    ("tensor_parallel.autotp_size", 4, "memory", "down"),
    ("sequence_parallel_size", 2, "memory", "down"),
]


def figures(argv):
    """Return the figures of `holmes plan` for this command line's layout."""
    said = describe(argv)
    assert said.model is not None, said.trouble
    model, sizes = said.model, (said.sizes or Sizes()).complete(SITE.world_size, 4)
    result = SearchResult(
        Network(SITE),
        model,
        0,
        rules=Rules(overlap=True),
        stock_overlap=said.overlap,
        gather_overlap=said.gather_overlap,
    )
    one = timed(
        result,
        layout_candidate(
            result, sizes, shape_of(model, sizes, said.zero, said.virtual), said.stage_layers
        ),
    )
    return {
        "step": one.step_s,
        "stock": stock_like(result, one)[1].step_s,
        "memory": one.peak_bytes,
        "same": 0,
        "parameters": model.parameters,
        "memory of the first": one.memory_bytes[0],
        "closed form": one.formula_s,
        "memory of the last": one.memory_bytes[-1],
        "gradient width": model.gradient_width,
        **causes(result, one),
    }


def moved(before, after, figure, where):
    return {
        "up": after[figure] > before[figure],
        "down": after[figure] < before[figure],
        "moves": after[figure] != before[figure],
        "same": after[figure] == before[figure],
    }[where]


@pytest.mark.parametrize(
    "there, added, figure, where", MOVES, ids=[f"{row[1]}: {row[2]}" for row in MOVES]
)
def test_a_flag_moves_the_prediction_the_right_way(there, added, figure, where):
    before, after = figures(there.split()), figures([*there.split(), *added.split()])
    assert moved(before, after, figure, where), (before[figure], after[figure])


@pytest.mark.parametrize("key, value, figure, where", KEYS, ids=[row[0] for row in KEYS])
def test_a_key_of_ds_config_moves_it_too(key, value, figure, where, tmp_path):
    start = (
        BASE if key != "gradient_accumulation_steps" else {**BASE, "gradient_accumulation_steps": 4}
    )
    if key == "gradient_accumulation_steps":
        start = {name: value for name, value in start.items() if name != "train_batch_size"}
    stages = (
        ""
        if key.startswith(("zero_optimization.ov", "pipeline"))
        else " --pipeline-model-parallel-size 2"
    )
    tensor = "" if key.startswith("tensor") else " --tensor-model-parallel-size 2"
    words = (
        "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --vocab-size 50257"
        f" --deepspeed_config {tmp_path / 'ds.json'}{stages}{tensor}"
    ).split()

    def with_config(config):
        (tmp_path / "ds.json").write_text(json.dumps(config))
        return figures(words)

    if key.endswith("overlap_comm"):
        words += "--num-layers 4 --hidden-size 4096 --seq-length 4096".split()
        start = {**BASE, "train_batch_size": 16}
    if "offload" in key or "grad_accum" in key:  # refused at ZeRO 0
        start = {**start, "zero_optimization": {"stage": 1}}
    before, changed = with_config(start), json.loads(json.dumps(start))
    *tables, last = key.split(".")
    table = changed
    for name in tables:
        table = table.setdefault(name, {})
    table[last] = value
    assert moved(before, with_config(changed), figure, where)


def test_no_flag_that_is_read_lacks_its_row():
    rows = " ".join(f"{there} {added}" for there, added, _, _ in MOVES).split()
    # test_arguments.py, tests/runtime/groups/test_grid.py
    elsewhere = {
        "--num-distributed-optimizer-instances",
        "--tokenizer-type",
        "--deepspeed_config",
        "--deepspeed-config",
    }
    assert set(SETTING_OF_FLAG) - elsewhere <= set(rows)
    assert set(SETTING_OF_KEY) == {row[0] for row in KEYS}


@pytest.mark.parametrize("flag", [name for name in REASON_NOT_COUNTED if name.startswith("--")])
def test_what_matters_and_is_not_read_is_named(flag):
    said = describe([*BF16.split(), flag, "7"])
    assert (
        any(flag in line and REASON_NOT_COUNTED[flag] in line for line in said.not_counted)
        and flag not in said.unknown
    )
    for value in VALUES_WITHOUT_EFFECT.get(flag, ()):
        value = "2" if value == "tensor" else value
        assert not any(flag in line for line in describe([*BF16.split(), flag, value]).not_counted)


def test_keys_that_are_not_read_and_unknown_ones_are_named(tmp_path):
    config = {
        **BASE,
        "zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}, "nonsense": 1},
        "compression_training": {"weight_quantization": {"shared": 1}},
        "steps_per_print": 3,
        "amp": {"enabled": False},
        "fp16": {"enabled": False},
        "train_batch_size": "auto",
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    said = describe(
        [
            *BF16.split(),
            "--deepspeed_config",
            str(tmp_path / "ds.json"),
            "--my-own",
            "3",
            "--lr",
            "1",
        ]
    )
    named = " ".join(said.not_counted)
    assert (
        "zero_optimization.offload_param" in named
        and "compression_training" in named
        and "amp" not in named
    )
    assert said.unknown == ("--my-own", "ds.json: zero_optimization.nonsense") and said.zero == 1


def test_ds_config_counts_where_the_flags_differ(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({**BASE, "train_batch_size": 32}))
    said = describe([*GPT.split(), "--deepspeed_config", str(tmp_path / "ds.json")])
    assert (
        said.model.global_batch == 32
        and "global batch 32 of ds.json counts, not 64 of the flags" in said.assumed
    )
    (tmp_path / "ds.json").write_text("{")
    said = describe([*GPT.split(), "--deepspeed_config", str(tmp_path / "ds.json")])
    assert "ds.json: cannot be read as JSON: its settings are not counted" in said.not_counted


def test_the_ds_config_of_a_trainer_is_read(tmp_path):
    """The Trainer of transformers takes the file as --deepspeed FILE."""
    (tmp_path / "ds.json").write_text(json.dumps({**BASE, "zero_optimization": {"stage": 3}}))
    described = describe(["train.py", "--deepspeed", str(tmp_path / "ds.json"), "--lr", "1"])
    assert described.training["zero"] == 3 and described.training["micro_batch"] == 2
    assert describe(["train.py", "--deepspeed", "--lr", "1"]).training == {}


def test_no_name_is_in_two_tables():
    both = {
        "--optimizer-cpu-offload",
        "--cpu-optimizer",
    }  # read for the memory, named for their transfers
    assert set(SETTING_OF_FLAG) & set(REASON_NOT_COUNTED) == both
    assert not [
        flag
        for flag in (*SETTING_OF_FLAG, *REASON_NOT_COUNTED)
        if flag in FLAG_PREFIXES_WITHOUT_EFFECT
    ]
    assert not set(SETTING_OF_KEY) & set(KEY_PREFIXES_WITHOUT_EFFECT)


@pytest.mark.parametrize(
    "text, layers",
    [
        ("Et|t*7L", (1, 7)),
        ("Ettt|(t)*5,L", (3, 5)),
        ("Et*4|t*4L", ()),
        ("Et*8|L", ()),
        ("nonsense", ()),
    ],
)
def test_layouts(text, layers):
    said = describe([*BF16.split(), "--pipeline-model-parallel-layout", text])
    assert said.stage_layers == layers
    assert any("layout" in line for line in said.assumed) == (text in ("Et*8|L", "nonsense"))


@pytest.mark.parametrize(
    "text, routed", [("2", 4), ("([0]+[1]*3)*2", 6), ("2*([0]+[1]*3)", 6), ("[1]*8", 8)]
)
def test_how_often_layers_have_experts(text, routed):
    assert describe([*MOE.split(), "--moe-layer-freq", text]).model.expert_layers == routed


@pytest.mark.parametrize(
    "text, part",
    [
        ("3*4", "neither a number above 0 nor a list"),
        ("0", "neither a number above 0 nor a list"),
        ("[1]*9999*9999", "neither a number above 0 nor a list"),
        ("9999*9999*[1]", "neither a number above 0 nor a list"),
        ("[[1]*9999]*9999", "neither a number above 0 nor a list"),
        ("[1]*-1*9999", "neither a number above 0 nor a list"),
        ("[1]+1", "neither a number above 0 nor a list"),
        ("[1.5]*8", "neither a number above 0 nor a list"),
        ("(" * 500, "neither a number above 0 nor a list"),
        ("__import__('os')", "neither a number above 0 nor a list"),
        ("[1]*7", "the list has 7 entries for 8 layers"),
    ],
)
def test_a_wrong_frequency_of_experts_is_refused_as_megatron_does(text, part):
    """The list of a short expression is never built if it is longer than any model."""
    described = describe([*MOE.split(), "--moe-layer-freq", text])
    assert described.model is None and part in described.trouble


def test_a_frequency_of_experts_far_too_long_fills_no_memory():
    tracemalloc.start()
    describe([*MOE.split(), "--moe-layer-freq", "*".join(["[1]", *["99999"] * 40])])
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()


HYBRID = "a model with several kinds of layers"


@pytest.mark.parametrize(
    "words, part",
    [
        (f"{BF16} --is-hybrid-model", HYBRID),
        (f"{BF16} --hybrid-override-pattern M-M-M-*-M-M-M-*-", HYBRID),
        (f"{BF16} --hybrid-layer-pattern MEM*|MEM*/ME", HYBRID),
        (f"{BF16} --hybrid-attention-ratio 0.08", HYBRID),
        (f"{BF16} --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec", HYBRID),
        (f"pretrain_mamba.py {BF16}", HYBRID),
        (f"/opt/megatron/pretrain_hybrid.py {BF16}", HYBRID),
        (f"{NO_LAYERS} --decoder-num-layers 8", "--decoder-num-layers 8: a model with an encoder"),
        (f"{NO_SEQUENCE} --decoder-seq-length 128", "a model with an encoder and a decoder"),
        (f"pretrain_t5.py {BF16} --decoder-seq-length 128", "pretrain_t5.py: a model with an enc"),
        (f"{BF16} --encoder-num-layers 8", "Megatron refuses --num-layers beside --encoder-num-"),
        (f"{BF16} --encoder-seq-length 8", "Megatron refuses --seq-length beside --encoder-seq-"),
    ],
)
def test_a_model_that_is_no_stack_of_equal_blocks_is_refused(words, part):
    described = describe(words.split())
    assert described.model is None and part in described.trouble
    assert not described.unknown and "add it" not in described.trouble


@pytest.mark.parametrize("flag", ["--freeze-LM", "--freeze-clip-vision-tower", "--lora-rank"])
def test_frozen_parts_are_named(flag):
    described = describe([*BF16.split(), flag, "8"])
    assert not described.unknown
    (line,) = [line for line in described.not_counted if flag in line]
    assert "are counted as" in line


def test_a_batch_of_0_is_refused_with_its_flag():
    described = describe([*BF16.split(), "--global-batch-size", "0"])
    assert described.trouble == "--global-batch-size is 0; it must be 1 or more"


def test_a_bert_is_counted_as_a_gpt_and_this_is_said():
    described = describe(["pretrain_bert.py", *NO_VOCABULARY.split()])
    assert described.model.vocabulary == 30720
    assert any("heads of pretrain_bert.py are not counted" in line for line in described.assumed)


def test_a_refusal_names_the_flag_of_layers_that_the_command_has():
    words = NO_LAYERS.replace(
        "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 3"
    )
    described = describe(words.split())
    sizes = Sizes(pipeline=3, tensor=2, data=2)
    (line,) = refusals(described, sizes, world=12)
    assert line.startswith("--encoder-num-layers 8 does not divide by")


def test_a_flag_is_harmless_by_its_whole_words_only():
    """Flags of forks that begin with the letters of a harmless one are unknown."""
    described = describe([*BF16.split(), "--save-interval", "5", "--saved-copies", "2"])
    assert described.unknown == ("--saved-copies",)
    assert describe([*BF16.split(), "--normalizer-width", "5"]).unknown == ("--normalizer-width",)


def test_names_with_underscores_are_read():
    """Megatron-LLM and ms-swift write Megatron's options with underscores."""
    words = BF16.replace("-", "_").replace("__", "--").split()
    assert describe(words) == describe(BF16.split())
    other = describe(["--num_layers", "4", "--hidden_size", "8", "--bf16"])
    assert other.framework == "", "a script that is not like Megatron keeps its names"


@pytest.mark.parametrize(
    "flags", [("--deepspeed_config",) * 2, ("--deepspeed_config", "--deepspeed-config")]
)
def test_the_last_of_two_equal_flags_counts(flags, tmp_path):
    words = [*BF16.split(), "--num-layers", "16"]
    for flag, stage in zip(flags, (2, 0)):
        path = tmp_path / f"stage{stage}.json"
        path.write_text(json.dumps({**BASE, "zero_optimization": {"stage": stage}}))
        words += [flag, str(path)]
    described = describe(words)
    assert described.model.layers == 16 and described.zero == 0


def test_what_is_assumed_is_said():
    words = BF16.replace("--vocab-size 50257", "--tokenizer-type SentencePieceTokenizer").replace(
        "--global-batch-size 64", ""
    )
    said = describe(words.split())
    assert any(
        "vocabulary 50257" in line and "SentencePieceTokenizer" in line for line in said.assumed
    )
    assert (
        any("one micro-batch a step" in line for line in said.assumed)
        and said.model.micro_batches == 1
    )
    assert any("transformer_engine" in line for line in said.assumed)
