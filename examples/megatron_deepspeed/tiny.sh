#!/bin/bash
# A tiny GPT with Megatron-DeepSpeed's own pretrain_gpt.py, on CPUs. In the folder of its checkout:
#
#   bash tiny.sh prepare       compiles its index helper and makes a corpus, once
#   ... bash tiny.sh FLAGS     trains, started on every node as pretrain_gpt.py would be; FLAGS come last
set -eu
here=$(cd "$(dirname "$0")" && pwd)
# What it needs on CPUs with current packages, with or without holmes (sitecustomize.py says what).
export PYTHONPATH="$here/site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
export DS_ACCELERATOR=cpu CUDA_DEVICE_MAX_CONNECTIONS=1 TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1
case " $* " in *" --holmes "*) ;; *) export STAND_INS=1 ;; esac
tokens="--vocab-file examples_deepspeed/rebase/gpt2-vocab.json --merge-file examples_deepspeed/rebase/gpt2-merges.txt"

if [ "${1-}" = prepare ]; then
    make -C megatron/data
    python -c 'import json; from pydoc_data.topics import topics
for name in sorted(topics): print(json.dumps({"text": topics[name]}))' > topics.jsonl
    exec python tools/preprocess_data.py --input topics.jsonl --output-prefix topics $tokens --append-eod \
        --tokenizer-type GPT2BPETokenizer --dataset-impl mmap --workers 1
fi
exec python pretrain_gpt.py $tokens --data-path topics_text_document --data-impl mmap --split 90,5,5 --num-workers 0 \
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 \
    --micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --lr-decay-style constant --seed 1234 \
    --attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-interval 1000 --eval-iters 0 \
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion \
    --no-async-tensor-model-parallel-allreduce --ds_fused_adam \
    --deepspeed --deepspeed_config "$here/ds.json" "$@"
