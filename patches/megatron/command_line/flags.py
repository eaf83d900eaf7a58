"""Tables of the flags of Megatron-LM and Megatron-DeepSpeed, and of the keys of DeepSpeed's ds_config.

holmes predicts the step time of a job from its command line. The tables say how each flag or key counts:

    SETTING_OF_FLAG, SETTING_OF_KEY
        Flags and keys that give a setting of the job, such as the number of layers.
    REASON_NOT_COUNTED
        Flags and keys that change the time or memory of a step, but are not counted in the
        prediction, with the reason. VALUES_WITHOUT_EFFECT has the values with which some of them
        change nothing after all. REASON_OF_PREFIX has beginnings of such flags.
    MODEL_OF_FLAG
        Flags of models that holmes does not predict.
    FLAG_PREFIXES_WITHOUT_EFFECT, KEY_PREFIXES_WITHOUT_EFFECT
        Beginnings of flags and keys that change neither sizes, memory nor traffic, or by less than
        0.1 % (the bias of a norm).

A flag that is in no table is reported to the user as unknown. A setting is a field of Sizes or Model
(plan/), or a value from which describe.py computes such fields.

Sources: megatron/training/arguments.py and megatron/core/transformer/transformer_config.py (Megatron-LM),
megatron/arguments.py (Megatron-DeepSpeed).
"""

from __future__ import annotations

from typing import Any, NamedTuple

#: Name of a number format -> bytes of one element.
_WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
#: Names of a number format in DeepSpeed's data_types (DtypeEnum of its runtime/config.py) -> its short name.
_PRECISIONS = {
    alias: name
    for name, aliases in {
        "fp32": "fp32 float32 float torch.float32",
        "fp16": "fp16 float16 half torch.float16",
        "bf16": "bf16 bfloat16 torch.bfloat16",
    }.items()
    for alias in aliases.split()
}


class SettingRule(NamedTuple):
    """Setting that a flag or a key of ds_config gives, and the conversion of the words after the flag."""

    setting: str  # name of the setting, such as "layers"
    #: int, float or str: the word after the flag, converted to this type. list: all whole numbers after
    #: the flag. A dictionary translates the word; its entry "" is for all words that it does not have.
    #: Any other value is the value of the setting itself, for flags without words.
    conversion: Any


def _table(*rows: tuple[Any, ...]) -> dict[str, SettingRule]:
    """Build a table from flag (or key of ds_config) to the setting that it gives (SettingRule).

    Args:
        rows: Tuples (setting, conversion, flag, ...). All flags of a row give the same setting.
    """
    table = {}
    for setting, conversion, *flags in rows:
        for flag in flags:
            table[flag] = SettingRule(setting, conversion)
    return table


#: Parallel sizes.
SIZES = _table(
    ("pipeline", int, "--pipeline-model-parallel-size"),
    ("tensor", int, "--tensor-model-parallel-size"),
    ("context", int, "--context-parallel-size", "--ds-sequence-parallel-size"),
    ("expert", int, "--expert-model-parallel-size", "--moe-expert-parallel-size"),
    ("pipeline", 1, "--no-pipeline-parallel"),  # Megatron-DeepSpeed without its pipeline engine
    ("order", "tp-cp-ep-pp-dp", "--use-tp-pp-dp-mapping"),  # data-parallel ranks outermost
    # Each instance of the distributed optimizer first sums gradients among its own ranks.
    ("instances", int, "--num-distributed-optimizer-instances"),
)

#: Sizes and parts of the model.
MODEL = _table(
    ("layers", int, "--num-layers"),
    (
        "encoder_layers",
        int,
        "--encoder-num-layers",
    ),  # another name of --num-layers, or T5's encoder
    ("hidden", int, "--hidden-size"),
    ("heads", int, "--num-attention-heads"),
    ("sequence", int, "--seq-length"),
    ("encoder_sequence", int, "--encoder-seq-length"),  # another name of --seq-length
    ("decoder_sequence", int, "--decoder-seq-length"),
    ("ffn", int, "--ffn-hidden-size"),
    ("head_size", int, "--kv-channels"),
    ("query_groups", int, "--num-query-groups"),  # counts with --group-query-attention
    ("grouped", True, "--group-query-attention"),
    ("groups", int, "--num-key-value-heads"),  # Megatron-DeepSpeed's
    ("max_positions", int, "--max-position-embeddings"),
    ("vocabulary", int, "--vocab-size"),
    # The second is of BigScience's Megatron-DeepSpeed.
    ("padded_vocabulary", int, "--padded-vocab-size", "--pad-vocab-size-to"),
    ("divisible", int, "--make-vocab-size-divisible-by"),
    ("divisible", 0, "--no-pad-vocab-size"),
    (
        "tokenizer",
        str,
        "--tokenizer-type",
        "--patch-tokenizer-type",
    ),  # the second is Pai-Megatron's
    ("tokenizer_model", str, "--tokenizer-model", "--tokenizer-name-or-path"),
    ("gated", True, "--swiglu"),
    ("geglu", True, "--quick-geglu", "--geglu"),
    ("geglu", {"": True}, "--glu-activation"),  # BigScience's: swiglu, geglu, liglu or reglu
    ("bias", False, "--disable-bias-linear"),
    ("tied", False, "--untie-embeddings-and-output-weights"),
    ("positions", {"learned_absolute": "learned", "": "none"}, "--position-embedding-type"),
    ("positions", "none", "--use-rotary-position-embeddings", "--no-position-embedding"),
    ("experts", list, "--num-experts"),  # Megatron-DeepSpeed's may differ from layer to layer
    ("experts_per_token", int, "--moe-router-topk", "--topk"),
    ("expert_ffn", int, "--moe-ffn-hidden-size"),
    ("shared_ffn", int, "--shared-moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size"),
    ("expert_frequency", str, "--moe-layer-freq", "--expert-interval"),
    ("residual", {"residual": True, "": False}, "--mlp-type"),  # an MLP beside the experts
    # Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).
    ("latent", True, "--multi-latent-attention"),
    ("query_rank", int, "--q-lora-rank"),
    ("key_value_rank", int, "--kv-lora-rank"),
    ("latent_head_size", int, "--qk-nope-head-dim", "--qk-head-dim"),
    ("rotary_size", int, "--qk-rope-head-dim", "--qk-pos-emb-head-dim"),
    ("value_size", int, "--v-head-dim"),
)

#: Batch size, precision, optimizer, recomputation, and the split of the layers.
TRAINING = _table(
    ("micro_batch", int, "--micro-batch-size", "--batch-size"),
    ("global_batch", int, "--global-batch-size"),
    ("precision", "bf16", "--bf16"),
    ("precision", "fp16", "--fp16"),
    ("gradient_width", 2, "--grad-reduce-in-bf16"),
    ("gradient_width", 4, "--accumulate-allreduce-grads-in-fp32"),
    ("main_gradient_width", _WIDTHS, "--main-grads-dtype"),
    ("main_weight_width", _WIDTHS, "--main-params-dtype"),
    ("first_moment_width", _WIDTHS, "--exp-avg-dtype"),
    ("second_moment_width", _WIDTHS, "--exp-avg-sq-dtype"),
    ("optimizer", str, "--optimizer"),
    ("offloaded", 1.0, "--optimizer-cpu-offload", "--cpu-optimizer"),
    ("offload_fraction", float, "--optimizer-offload-fraction"),
    ("sequence_parallel", True, "--sequence-parallel"),
    ("recompute", {"full": "full", "selective": "selective"}, "--recompute-granularity"),
    # Megatron-LM before --recompute-granularity.
    ("recompute", {"": "full"}, "--activations-checkpoint-method"),
    ("recompute", "selective", "--recompute-activations"),
    # Megatron-DeepSpeed, and old versions of Megatron-LM.
    ("recompute", "full", "--checkpoint-activations"),
    ("implementation", str, "--transformer-impl"),
    ("attention", str, "--attention-backend"),
    (
        "attention",
        "flash",
        "--use-flash-attn",
        "--use-flash-attn-v1",
        "--use-flash-attn-v2",
        "--use-flash-attn-triton",
        "--use-flash-attn-builder",
    ),
    ("zero", 1, "--use-distributed-optimizer"),
    ("zero", 3, "--use-torch-fsdp2"),
    ("fsdp", True, "--use-megatron-fsdp", "--use-custom-fsdp"),
    (
        "fsdp_zero",
        {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3},
        "--data-parallel-sharding-strategy",
    ),
    ("zero", int, "--zero-stage"),  # Megatron-DeepSpeed's; ds_config overrules it
    ("overlap", True, "--overlap-grad-reduce"),
    ("gather_overlap", True, "--overlap-param-gather"),
    ("virtual", int, "--num-virtual-stages-per-pipeline-rank"),
    ("layers_per_chunk", int, "--num-layers-per-virtual-pipeline-stage"),
    ("first_layers", int, "--decoder-first-pipeline-num-layers"),
    ("last_layers", int, "--decoder-last-pipeline-num-layers"),
    ("embedding_counts", True, "--account-for-embedding-in-pipeline-split"),
    ("loss_counts", True, "--account-for-loss-in-pipeline-split"),
    ("layout", str, "--pipeline-model-parallel-layout"),
    ("deepspeed", True, "--deepspeed"),
    ("ds_config", str, "--deepspeed_config", "--deepspeed-config"),
)

#: Flag -> the setting that it gives.
SETTING_OF_FLAG = {**SIZES, **MODEL, **TRAINING}
#: Flags that only Megatron-DeepSpeed has: its defaults differ from Megatron-LM's.
MEGATRON_DEEPSPEED = (
    "--deepspeed",
    "--no-pipeline-parallel",
    "--zero-stage",
    "--ds-sequence-parallel-size",
    "--num-key-value-heads",
    "--moe-expert-parallel-size",
    "--deepspeed-activation-checkpointing",
)
#: Key of ds_config -> the setting that it gives. Keys of nested tables are joined by dots. The
#: value "auto" is ignored.
SETTING_OF_KEY = _table(
    ("global_batch", int, "train_batch_size"),
    ("micro_batch", int, "train_micro_batch_size_per_gpu"),
    ("micro_batches", int, "gradient_accumulation_steps"),
    ("precision", {True: "bf16"}, "bf16.enabled", "bfloat16.enabled"),
    ("precision", {True: "fp16"}, "fp16.enabled"),
    ("communication_width", _WIDTHS, "communication_data_type"),
    ("sums", _PRECISIONS, "data_types.grad_accum_dtype"),
    ("optimizer", str, "optimizer.type"),
    ("zero", int, "zero_optimization.stage"),
    ("overlap", {True: True, False: False}, "zero_optimization.overlap_comm"),
    (
        "offload",
        {"cpu": "cpu", "nvme": "nvme", "none": ""},
        "zero_optimization.offload_optimizer.device",
    ),
    ("offload", {True: "cpu"}, "zero_optimization.cpu_offload"),
    ("pipeline", int, "pipeline.stages"),
    ("checkpoint_interval", int, "pipeline.activation_checkpoint_interval"),
    ("tensor", int, "tensor_parallel.autotp_size"),
    ("context", int, "sequence_parallel_size"),
)

_SEVERAL_KINDS = "several kinds of layers (Mamba, attention, MLP)"
#: Flag -> layers of a model with this flag, in words for a message. It is no stack of equal
#: transformer blocks, and holmes predicts no such model (other_models.py).
MODEL_OF_FLAG = {
    "--hybrid-layer-pattern": _SEVERAL_KINDS,
    "--hybrid-override-pattern": _SEVERAL_KINDS,
    "--is-hybrid-model": _SEVERAL_KINDS,
    "--hybrid-attention-ratio": _SEVERAL_KINDS,
    "--hybrid-mlp-ratio": _SEVERAL_KINDS,
    "--decoder-num-layers": "an encoder and a decoder",
}

#: Flag, or key of ds_config -> why the prediction does not count it. The literal below is the other way
#: round: reason -> flags and keys.
REASON_NOT_COUNTED: dict[str, str] = {
    name: reason
    for reason, names in {
        "the file is not read; give the model with --model FILE": """
        --yaml-cfg --heterogeneous-layers-config-path""",
        "the checkpoint's arguments are not read; give the flags themselves": "--use-checkpoint-args",
        "every layer is counted as the transformer block that the other flags describe": """
        --heterogeneous-layers-config-encoded-json --spec --enable-mhc-connections
        --retro-add-retriever --vision-pretraining --enable-gpt-oss compression_training""",
        "computing and activations are counted as in 16 bits; gpu_flops of cluster.toml can say what is "
        "reached": """
        --te-precision-config-file --fp8-format --fp8-hybrid --fp8-e4m3 --fp4-format --fp8-param-gather
        --fp4-param-gather --reuse-grad-buf-for-mxfp8-param-ag torch_autocast""",
        "holmes chooses each group's network": "--nccl-communicator-config-path",
        "DeepSpeed's old name for --deepspeed_config is not read": "--deepscale_config",
        "attention is counted as plain multi-head (or grouped) attention": """
        --experimental-attention-variant
        --linear-attention-freq --window-size --sliding-window --attention-output-gate
        --export-force-local-attention
        sparse_attention""",
        "layers that predict further tokens are not counted": "--mtp-num-layers",
        "frozen layers are counted as trained": """
        --freeze-all-layers --freeze-LM --freeze-ViT --bitfit""",
        "only the language model that the other flags describe is counted": """
        --model-provider --language-model-type --vision-model-type""",
        "adapters (LoRA) are counted as training of all weights": """
        --train-type --tuner-type --target-modules --peft""",
        "experts are counted as evenly used, their traffic as all-to-alls in 16 bits": """
        --moe-latent-size --moe-expert-capacity-factor --moe-train-capacity-factor
        --moe-pad-expert-input-to-capacity --moe-token-dispatcher-type --moe-enable-deepep
        --moe-flex-dispatcher-backend --disable-moe-token-dropping --moe-dispatch-fwd-dtype
        --moe-combine-bwd-dtype --moe-extended-tp --use-tutel""",
        "the stages' layers are counted as even": """
        --mtp-standalone --pipeline-model-parallel-split-rank --standalone-embedding-stage
        --pp-partition-method pipeline.partition""",
        "the teacher's forward pass is not counted": """
        --kd --mos --load-teacher --num-layers-teacher --export-kd-teacher-load""",
        "every step is counted with the full batch and sequence": """
        --rampup-batch-size --step-batch-size-schedule --random-ltd --data-efficiency-curriculum-learning
        --curriculum-learning --decrease-batch-size-if-needed --max-seqlen-per-dp-cp-rank
        curriculum_learning data_efficiency progressive_layer_drop""",
        "weights are counted as split by the tensor size": """
        --expert-tensor-parallel-size --enable-expert-tensor-parallelism
        --tensor-parallel-num-weight-shards --expert-tensor-parallel-num-weight-shards""",
        "every layer is counted as recomputed by itself": """
        --moe-layer-recompute --recompute-num-layers --checkpoint-num-layers --mhc-recompute-layer-num
        activation_checkpointing.number_checkpoints""",
        "what it moves to the host is counted as staying on the GPU": """
        --moe-paged-stash --distribute-saved-activations --distribute-checkpointed-activations
        --partition-activations --checkpoint-in-cpu --cpu-offloading-num-layers
        --fine-grained-activation-offloading --remote-device --memory-centric-tiled-linear
        zero_optimization.offload_param zero_optimization.cpu_offload_params
        activation_checkpointing.partition_activations activation_checkpointing.cpu_checkpointing""",
        "what it hides is counted in full: the step may take less": """
        --moe-shared-expert-overlap --overlap-moe-expert-parallel-comm
        --overlap-dispatch-backward-with-experts-wgrad --tp-comm-overlap --delay-wgrad-compute
        --defer-embedding-wgrad-compute --overlap-p2p-communication-warmup-flush
        --overlap-param-gather-with-optimizer-step""",
        "the context group is counted as a ring": """
        --cp-comm-type --force-ds-sequence-parallel --hierarchical-context-parallel-sizes
        --hybrid-context-parallel""",
        "its chunks, and what it moves to the host, are not counted": "--ds-sequence-parallel-fpdt",
        "an old name of --tensor-model-parallel-size": "--model-parallel-size",
        "chunks are counted in groups of the pipeline size": """
        --microbatch-group-size-per-virtual-pipeline-stage""",
        "the schedule is counted as 1F1B": "--enable-zbh1-pipeline --enable-zbh1-exact-semantics",
        "only attention is counted as recomputed": "--recompute-modules",
        "its transfers to the host are not counted": """
        --optimizer-cpu-offload --cpu-optimizer zero_optimization.offload_optimizer.device
        zero_optimization.cpu_offload""",
        "activations are counted in 16 bits": "--fp32-residual-connection",
        "weights are counted in 16 bits": "--embedding-weights-in-fp32",
        "buckets are counted as holmes cuts them": """
        --ddp-bucket-size --ddp-num-buckets --zero-reduce-bucket-size --zero-allgather-bucket-size
        zero_optimization.reduce_bucket_size zero_optimization.allgather_bucket_size""",
        "counted as sharded over all data-parallel ranks, in full width": """
        --outer-dp-sharding-strategy --enable-full-sharding-in-hsdp --megatron-fsdp-main-params-dtype
        --megatron-fsdp-main-grads-dtype --megatron-fsdp-grad-comm-dtype
        --torch-fsdp2-no-reshard-after-forward --ddp-reduce-scatter-with-fp32-accumulation
        zero_optimization.zero_hpz_partition_size zero_optimization.mics_shard_size
        zero_optimization.zero_quantized_weights zero_optimization.zero_quantized_gradients
        sparse_gradients communication_data_type_seq_parallel""",
        "SHARP's sums in the switch are not counted": "--use-sharp",
        "only the training step is counted, not what generates its samples": "--perform-rl-step",
        "computing is counted as the other settings say": "amp",
    }.items()
    for name in names.split()
}

#: Beginning of flags of many forks -> why the prediction does not count such a flag.
REASON_OF_PREFIX = {
    "--freeze": "frozen layers are counted as trained",
    "--lora": "adapters (LoRA) are counted as training of all weights",
}

#: Flag or key of REASON_NOT_COUNTED -> values with which it changes nothing. "tensor" stands for
#: the tensor-parallel size. The literal below is the other way round: values -> flags and keys.
VALUES_WITHOUT_EFFECT: dict[str, tuple[str, ...]] = {
    name: values
    for values, names in {
        ("tensor",): "--expert-tensor-parallel-size",
        ("",): "--window-size",
        ("0",): "--mtp-num-layers --linear-attention-freq",
        ("0.0",): "--zero-reduce-bucket-size --zero-allgather-bucket-size",
        ("1",): """
        --recompute-num-layers --checkpoint-num-layers --tensor-parallel-num-weight-shards
        --expert-tensor-parallel-num-weight-shards zero_optimization.zero_hpz_partition_size""",
        ("1", "1.0"): "--moe-train-capacity-factor",
        ("-1",): "zero_optimization.mics_shard_size",
        ("p2p",): "--cp-comm-type",
        ("core_attn",): "--recompute-modules",
        ("alltoall", "alltoall_seq"): "--moe-token-dispatcher-type",
        ("local",): "--spec",
        ("bf16",): "--moe-dispatch-fwd-dtype --moe-combine-bwd-dtype",
        ("uniform", "best"): "pipeline.partition",
        ("none",): """
        --remote-device zero_optimization.offload_optimizer.device zero_optimization.offload_param""",
        ("False",): """
        zero_optimization.cpu_offload zero_optimization.zero_quantized_weights sparse_gradients amp
        zero_optimization.zero_quantized_gradients curriculum_learning
        activation_checkpointing.partition_activations activation_checkpointing.cpu_checkpointing""",
    }.items()
    for name in names.split()
}

#: Beginnings of flags that change neither sizes, memory nor traffic.
FLAG_PREFIXES_WITHOUT_EFFECT = tuple(
    f"--{name}"
    for name in """
    data-path data-cache data-args data-impl data-per-class data-parallel-random split train- valid- test-
    full-validation multiple-validation validation-set per-split per-dataset mock-data vocab-file
    vocab-extra
    merge-file tokenizer- no-tokenizer tiktoken- null-tokenizer use-gigatoken chat-template trust-remote
    num-workers dataloader- no-create-attention-mask no-mmap-bin mmap-warmup num-dataset-builder
    object-storage mid-level-dataset allow-ambiguous reset- eod-mask-loss mask-prob mask-type mask-factor
    short-seq-prob sample-rate fim- sft phase-transition repeated-dataloader return-data-index aml-data
    use-dataset-only dataset max-padding-length finetune hf- retro- eval skip-train
    start-eval prompt- key- task pretrained-checkpoint enable-msc disable-msc conversation apply- img-
    patch-dim num-channels num-classes classes-fraction iterations-to-skip
    lr min-lr decoupled- warmup override-opt override-lr use-checkpoint-opt start-weight-decay
    end-weight-decay
    weight-decay no-weight-decay clip-grad adam- sgd- muon- lion- use-mup mup norm-target-loss
    loss-scale initial-loss-scale
    min-loss-scale hysteresis init-method embedding-init init-model hidden-dropout attention-dropout seed
    head-lr-mult dump-param calculate-per-token check-for no-check-for optimizer-cuda-graph
    use-precision-aware universal-checkpoint use-torch-optimizer overlap-cpu-optimizer no-pin-
    use-layer-wise no-use-layer-wise ds_fused_adam cpu_torch_adam moe-aux moe-loss moe-z-loss
    moe-input-jitter create-moe-param mtp-loss mtp-hybrid use-pin-memory kd-alpha kd-beta kd-temp grpo- rl-
    langrl- refit- mtp-detach mtp-hsm mtp-use-repeated num-experts-teacher hidden-size-teacher
    num-attention-heads-teacher num-experts-switch
    save load no-save no-load ckpt no-ckpt dist-ckpt use-dist-ckpt async- use-persistent-ckpt
    auto-detect-ckpt
    non-persistent exit- replication verify-integrity override-ckpt distrib-optim no-strict-fsdp kill-switch
    use-mp-args no-use-tokenizer log- no-log logging-level timing- no-barrier tensorboard- wandb- profile
    use-pytorch-profiler pytorch-profiler record- memory-snapshot nvtx config-logger one-logger
    no-one-logger otel- app-tag straggler disable-straggler run-workload result-rejected rerun-
    error-injection fault- inprocess- enable-ft calc-ft ft- flight-recorder no-flight gpu-sniff
    check-weight-hash adlr- moe-routing-trace moe-per-layer-logging logits- manual-gc no-manual-gc
    empty-unused-memory deterministic iter-per-epoch no-initialization use-cpu-initialization
    lazy-mpu local-rank local_rank fake-process-group use-mcore use-legacy no-masked-softmax no-bias-
    no-rope no-persist no-gradient- no-query-key rotary- rope- use-rope yarn- no-yarn mscale norm-epsilon
    normalization qk-layernorm qk-clip qk-l2
    layernorm- embed-layernorm abort-on-unmet sync-tp-duplicated add-qkv openai-gelu squared-relu
    onnx attention-softmax softmax-type fp16-lm-cross
    cross-entropy activation-func glu-linear-offset use-fused fused- use-te use-transformer-engine te-rng
    disable-jit disable-mem-efficient disable-bf16-reduced enable-cuda-graph cuda-graph external-cuda
    no-fp8-wgrad fp8-margin fp8-interval fp8-amax fp8-recipe fp8-quantization fp8-quantizer fp8-output
    fp4-recipe fp4-quantization fp4-quantizer first-last-layers
    num-layers-at use-kitchen kitchen- enable-experimental flash-attention-version flash-decode
    batch-invariant output-logit no-tp-comm tp-comm-overlap- tp-comm-bootstrap recompute-method
    delay-offload delta-offload activation-offload offload-modules min-offloaded fine-grained-offloading
    cpu-offloading-retain wgrad-deferral ep-overlap window-attn relative- mrope scattered
    tile- contigious- synchronize-each zero-contigious zero-reduce-scatter deepspeed-activation
    no-async-tensor no-clone-scatter cache-mla mla-down dsa- no-dsa linear- mamba- disable-mamba gdp- mhc-
    ds-sequence-parallel-fpdt- moe-grouped moe-permute moe-router- moe-use- moe-single moe-upcycling
    moe-min-capacity moe-eval-capacity-factor moe-token-dropping moe-apply moe-mlp-glu moe-deepep
    moe-hybridep
    moe-flex-dispatcher-num moe-ncclep moe-pad-experts-for moe-enable-routing
    moe-shared-expert-gate moe-shared-expert-glu
    moe-expert-rank moe-paged-stash- use-grouped disable-moe-top2
    inference ds-inference nccl-all-reduce-for symmetric-ar decode-only enable-chunked num-speculative
    use-same-sampling mlp-chunks swin- vision- dino- ict- biencoder bert- titles- query-in-block
    use-one-sent
    evidence- retriever- block-data embedding-path indexer- no-data-sharding output-bert max-tokens-to-oom
    distributed- pipeline-model-parallel-comm-backend use-ring-exchange no-overlap-p2p
    overlap-p2p-communication no-scatter-gather no-align align- ddp-pad ddp-average ddp-param DDP-impl
    no-contiguous disable-gloo sharp- high-priority create-all-gather use-nccl-ub disable-symmetric fsdp-
    suggested-communication keep-fp8 megatron-fsdp-version megatron-fsdp-enable megatron-fsdp-max gtp-
    deepscale
""".split()
)
#: Beginnings of ds_config keys that change neither sizes, memory nor traffic. The literal below has them
#: by table.
KEY_PREFIXES_WITHOUT_EFFECT = tuple(
    table + key
    for table, keys in {
        "": """
        steps_per_print wall_clock_breakdown dump_state optimizer.params scheduler fp16. bf16. bfloat16.
        gradient_clipping prescale_gradients gradient_predivide zero_allow_untested tensorboard wandb
        csv_monitor comet monitor flops_profiler comms_logger communication_options aio elasticity
        autotuning checkpoint data_types. zero_force_ds_cpu memory_breakdown disable_allgather eigenvalue
        nebula timers seq_parallel_communication use_data_before graph_harvesting compile
        weight_quantization hybrid_engine tensor_parallel dataloader_drop_last""",
        "zero_optimization.": """
        contiguous reduce_scatter allgather_partitions round_robin sub_group stage3_ elastic load_from
        ignore_unused offload_optimizer. gather_16bit param_persistence prefetch max_ use_
        memory_efficient cpu_offload_use legacy override pipeline_loading log_trace""",
        "activation_checkpointing.": "contiguous synchronize profile cpu_checkpointing_",
        "pipeline.": "seed activation pipe_partitioned grad_partitioned use_reentrant",
    }.items()
    for key in keys.split()
)
