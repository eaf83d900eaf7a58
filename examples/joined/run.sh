#!/bin/bash
# One of several jobs: run.sh NAME PORT [HOST:PORT of the coordinator]. PORT is torchrun's own.
set -e
exec torchrun --nproc-per-node 2 --master-port "$2" "$(dirname "$0")/../plain_torch/train.py" --steps 600 --layers 2 \
  --hidden 64 --sequence 64 --seed "$(( $(cksum <<< "$1" | cut -d' ' -f1) % 1000 ))" --log-file "$1.jsonl" \
  --holmes --holmes-join "$1@${3:-127.0.0.1:29600}"
