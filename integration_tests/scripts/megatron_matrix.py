"""Runs examples/megatron_core once for each of several splits in the same processes: starting them is what
takes the time.

    megatron_matrix.py SPLITS.json RESULTS.json

SPLITS.json: {name: [flags of train.py]}, where {results} stands for RESULTS.json's folder. RESULTS.json:
{name: {"entries": [the log's entries], "layers": {rank: [numbers of the layers that it built]}, "buckets":
{rank: [of each chunk, 0 where nothing overlaps]}, "gathers": {rank: whether weights travel during the forward
pass}}}, by rank 0. With --context above 1 the attention is gathered_attention.py's.
"""

import gc
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "megatron_core"))

import torch  # noqa: E402
import train  # noqa: E402  (loads the CPU shim before torch and megatron are used)
from gathered_attention import GatheredAttention  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402
from model import gpt_layer_specs  # noqa: E402
from options import parse_args  # noqa: E402


def allow_context_parallelism() -> None:
    """Without Transformer Engine."""
    spec_of = gpt_layer_specs.get_gpt_layer_local_spec

    def spec(*args, **kwargs):
        made = spec_of(*args, **kwargs)
        if parallel_state.get_context_parallel_world_size() > 1:
            made.submodules.self_attention.submodules.core_attention = GatheredAttention
        return made

    gpt_layer_specs.get_gpt_layer_local_spec = spec
    train.HAVE_TE = True  # what start_distributed() asks for


def main(splits: dict, results: Path) -> None:
    torch.set_num_threads(1)
    allow_context_parallelism()
    done, built = {}, []
    build = train.build

    def build_and_keep(args):
        made = build(args)
        models = made[1]
        layers = [
            layer.layer_number
            for model in models
            for layer in model.modules()
            if isinstance(layer, TransformerLayer)
        ]
        buckets = [
            len(model.bucket_groups) if model.ddp_config.overlap_grad_reduce else 0
            for model in models
        ]
        built[:] = layers, buckets, models[0].ddp_config.overlap_param_gather
        return made

    train.build = build_and_keep
    for name, flags in splits.items():
        entries = train.train(
            *parse_args([flag.replace("{results}", str(results.parent)) for flag in flags])
        )
        ranks = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(ranks, built)
        parts = {
            key: {rank: part[index] for rank, part in enumerate(ranks)}
            for index, key in enumerate(("layers", "buckets", "gathers"))
        }
        done[name] = {"entries": entries, **parts}
        parallel_state.destroy_model_parallel()
        for place in ("_EMBEDDING_GLOBAL_RANKS", "_POSITION_EMBEDDING_GLOBAL_RANKS"):
            setattr(parallel_state, place, None)  # which it leaves to the next split before 0.14
        gc.collect()
        if torch.distributed.get_rank() == 0:
            results.write_text(json.dumps(done))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
