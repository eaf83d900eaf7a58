"""Tests that the parameters counted from a command line are within 1 % of the published number.

The flags are those of public launch scripts where there are some; otherwise they follow from the model's
public configuration. Flags that do not touch the number of parameters are left out.
"""

from typing import NamedTuple

import pytest

from holmes_ext.patches.megatron.command_line.describe import describe

TOLERANCE = 0.01
#: Flags that a description needs, whatever the model.
BATCH = "--micro-batch-size 1 --global-batch-size 1024 --bf16"
#: Flags of models in the style of Llama.
LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights"
)


class Published(NamedTuple):
    """A model with its published number of parameters."""

    flags: str
    parameters: float
    source: str  # of the flags; and of the number, unless it is the model's own page


MODELS = {
    "GPT-3 175B": Published(
        "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
        "--max-position-embeddings 2048",
        175.0e9,
        "NVIDIA/Megatron-LM examples/gpt3/train_gpt3_175b_distributed.sh; arXiv 2005.14165, table 2.1",
    ),
    "Megatron 145B": Published(
        "--num-layers 80 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
        "--max-position-embeddings 2048 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8",
        145.6e9,
        "NVIDIA/Megatron-LM examples/academic_paper_scripts/sc21; arXiv 2104.04473, table 1",
    ),
    "BLOOM 176B": Published(
        "--num-layers 70 --hidden-size 14336 --num-attention-heads 112 --seq-length 2048 "
        "--max-position-embeddings 2048 --tokenizer-type PretrainedFromHF --pad-vocab-size-to 250880 "
        "--embed-layernorm --position-embedding-type alibi --deepspeed --zero-stage 0",
        176_247_271_424,
        "bigscience-workshop/bigscience train/tr11-176B-ml/tr11-176B-ml.slurm; arXiv 2211.05100, table 3",
    ),
    "Llama-2 70B": Published(
        "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
        "--group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 "
        f"--tokenizer-type Llama2Tokenizer {LLAMA}",
        68_976_648_192,
        "alibaba/Pai-Megatron-Patch examples/llama2/run_mcore_llama2_70b.sh; meta-llama/Llama-2-70b-hf",
    ),
    "Llama-3 8B": Published(
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 "
        f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-8B {LLAMA}",
        8_030_261_248,
        "swiss-ai/Megatron-LM submit-llama3-8b.sh, with Llama's tokenizer; meta-llama/Meta-Llama-3-8B",
    ),
    "Llama-3 70B": Published(
        "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
        "--group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 "
        f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-70B {LLAMA} "
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 8",
        70_553_706_496,
        "swiss-ai/Megatron-LM submit-llama3-70b.sh, with Llama's tokenizer; meta-llama/Meta-Llama-3-70B",
    ),
    "Mixtral 8x7B": Published(
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 32768 "
        f"--no-position-embedding --num-experts 8 --moe-router-topk 2 {LLAMA} "
        "--tokenizer-type Llama2Tokenizer --expert-model-parallel-size 8 --pipeline-model-parallel-size 4",
        46_702_792_704,
        "NVIDIA/Megatron-LM examples/mixtral/train_mixtral_8x7b_distributed.sh; mistralai/Mixtral-8x7B-v0.1",
    ),
    "DeepSeek-V3": Published(
        "--num-layers 61 --hidden-size 7168 --num-attention-heads 128 --ffn-hidden-size 18432 "
        "--seq-length 1024 --max-position-embeddings 4096 --kv-channels 128 --qk-layernorm "
        "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
        "--qk-pos-emb-head-dim 64 --v-head-dim 128 --num-experts 256 --moe-router-topk 8 "
        "--moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 "
        "--moe-layer-freq ([0]*3+[1]*58) --vocab-size 129280 --use-rotary-position-embeddings "
        "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights",
        671.0e9,
        "alibaba/Pai-Megatron-Patch examples/deepseek_v3/run_mcore_deepseek.sh; arXiv 2412.19437",
    ),
    "Qwen3-235B-A22B": Published(
        "--num-layers 94 --hidden-size 4096 --num-attention-heads 64 --ffn-hidden-size 12288 "
        "--seq-length 4096 --max-position-embeddings 40960 --kv-channels 128 --padded-vocab-size 151936 "
        "--group-query-attention --num-query-groups 4 --num-experts 128 --moe-router-topk 8 "
        f"--moe-ffn-hidden-size 1536 --moe-layer-freq ([1]*94) --qk-layernorm {LLAMA}",
        235_093_634_560,
        "alibaba/Pai-Megatron-Patch examples/qwen3/run_mcore_qwen3.sh (A22B); Qwen/Qwen3-235B-A22B",
    ),
    "GPT-NeoX 20B": Published(
        "--num-layers 44 --hidden-size 6144 --num-attention-heads 64 --seq-length 2048 "
        "--max-position-embeddings 2048 --padded-vocab-size 50432 --position-embedding-type rope "
        "--untie-embeddings-and-output-weights",
        20_554_567_680,
        "EleutherAI/gpt-neox configs/20B.yml as flags; arXiv 2204.06745",
    ),
    "OPT 175B": Published(
        "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
        "--max-position-embeddings 2048 --tokenizer-name-or-path facebook/opt-175b",
        175.0e9,
        "facebookresearch/metaseq projects/OPT as flags; arXiv 2205.01068, table 1",
    ),
    "Falcon 40B": Published(
        "--num-layers 60 --hidden-size 8192 --num-attention-heads 128 --kv-channels 64 "
        "--group-query-attention --num-query-groups 8 --seq-length 2048 --max-position-embeddings 2048 "
        "--vocab-size 65024 --no-pad-vocab-size --position-embedding-type rope --disable-bias-linear",
        41_303_293_952,
        "tiiuae/falcon-40b config.json as flags (new decoder architecture, tied embedding), and its number",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_parameters_of_a_published_model(name):
    published = MODELS[name]
    described = describe(["pretrain_gpt.py", *f"{published.flags} {BATCH}".split()])
    assert described.model is not None, described.trouble
    error = described.model.parameters / published.parameters - 1
    assert abs(error) < TOLERANCE, f"{described.model.parameters:,} parameters, {error:+.2%}"
    assert not described.unknown and not described.not_counted


def test_the_layers_of_latent_attention_are_split_among_tensor_parallel_ranks():
    """The matrices that compress are whole on each rank, the others are divided (DeepSeek-V3)."""
    flags = f"{MODELS['DeepSeek-V3'].flags} {BATCH}".split()
    model = describe(["pretrain_gpt.py", *flags]).model
    heads, per_head = 128, 128 + 64
    whole = 7168 * (1536 + 512 + 64) + 1536 + 512
    divided = heads * (1536 * per_head + 512 * (128 + 128) + 128 * 7168)
    dense_part = sum(model.costs(tensor=1)[1].tensors) - sum(model.costs(tensor=4)[1].tensors)
    mlp_and_shared = 3 * 7168 * (3 * 18432 + 58 * 2048) / 61
    assert dense_part == pytest.approx(0.75 * (divided + mlp_and_shared))
    assert sum(model.costs(tensor=1)[1].tensors) == pytest.approx(
        whole + divided + mlp_and_shared + 2 * 7168 + 7168 * 256 * 58 / 61
    )
