"""Runs examples/megatron_core once for each of several splits in the same processes.

    megatron_matrix.py SPLITS.json RESULTS.json

Starting the processes takes most of the time of a run. SPLITS.json is {name: [flags of train.py]}, where
{results} stands for the folder of RESULTS.json. Rank 0 writes RESULTS.json: {name: result}, and a result is

    entries    the log's entries
    layers     rank -> numbers of the layers that it built
    buckets    rank -> number of gradient buckets of each chunk, 0 if nothing overlaps
    gathers    rank -> whether weights are gathered during the forward pass

With --context above 1, attention is that of gathered_attention.py.
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
    """Let the example use context parallelism without Transformer Engine."""
    original = gpt_layer_specs.get_gpt_layer_local_spec

    def get_gpt_layer_local_spec(*args, **kwargs):
        spec = original(*args, **kwargs)
        if parallel_state.get_context_parallel_world_size() > 1:
            spec.submodules.self_attention.submodules.core_attention = GatheredAttention
        return spec

    gpt_layer_specs.get_gpt_layer_local_spec = get_gpt_layer_local_spec
    train.HAVE_TE = True  # start_distributed() refuses context parallelism without it


def main(splits: dict, results: Path) -> None:
    """Train all splits, and write the results."""
    torch.set_num_threads(1)
    allow_context_parallelism()
    result_of_split = {}
    built = []  # layers, buckets and gathers (see above) of this rank in the present split
    original_build = train.build

    def build(args):
        config, models, optimizer = original_build(args)
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
        return config, models, optimizer

    train.build = build
    for name, flags in splits.items():
        flags = [flag.replace("{results}", str(results.parent)) for flag in flags]
        entries = train.train(*parse_args(flags))
        ranks = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(ranks, built)
        parts = {
            key: {rank: part[index] for rank, part in enumerate(ranks)}
            for index, key in enumerate(("layers", "buckets", "gathers"))
        }
        result_of_split[name] = {"entries": entries, **parts}
        parallel_state.destroy_model_parallel()
        # megatron-core before 0.14 does not reset these variables.
        parallel_state._EMBEDDING_GLOBAL_RANKS = None
        parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None
        gc.collect()
        if torch.distributed.get_rank() == 0:
            results.write_text(json.dumps(result_of_split))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
