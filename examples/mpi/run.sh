#!/bin/bash
# A job over two clusters by Open MPI, without a scheduler: mpirun reaches the nodes by ssh and starts a process for each
# GPU. holmes sets torchrun's variables in each.
#
#   HOSTFILE=hosts ./run.sh python train.py [arguments]
#
set -euo pipefail

HOSTFILE=${HOSTFILE:-hosts} # holmes plan --nodes 12 --from-cluster cluster.toml --as hostfile -- COMMAND > hosts
CLUSTER=${CLUSTER:-$PWD/cluster.toml} # holmes discover --from hostfile hosts --output cluster.toml
FIRST=$(awk '!/^#/ && NF {print $1; exit}' "$HOSTFILE") # rank 0 runs there
SLOTS=$(awk -F 'slots=' '!/^#/ && NF {total += $2} END {print total}' "$HOSTFILE")

mpirun --hostfile "$HOSTFILE" -np "$SLOTS" --bind-to none \
    -x MASTER_ADDR="$FIRST" -x MASTER_PORT="${MASTER_PORT:-29500}" -x PATH -x LD_LIBRARY_PATH -x PYTHONPATH \
    "$@" --holmes --holmes-cluster "$CLUSTER" --holmes-telemetry runs

holmes report runs
