#!/usr/bin/env bash
# A recipe under torchrun, on one host or several. From the clone's root:
#
#   recipes/launch/torchrun.sh --config recipes/configs/gpt_1f1b.yaml --config recipes/launch/tiny.yaml
#
# On several hosts run the same command on each. The agents meet at a port of one of them, any:
#
#   NNODES=2 NPROC_PER_NODE=1 RDZV_ENDPOINT=node-0:29400 recipes/launch/torchrun.sh --config ...
#
# With several network interfaces, export GLOO_SOCKET_IFNAME, and NCCL_SOCKET_IFNAME for GPUs.
set -euo pipefail

NNODES=${NNODES:-1}
NPROC_PER_NODE=${NPROC_PER_NODE:-2} # one for each GPU
MAX_RESTARTS=${MAX_RESTARTS:-0}     # with more, add --ckpt_path=last: a restart goes on from there

if [[ -n ${RDZV_ENDPOINT:-} ]]; then
  # The c10d rendezvous needs no order of starting, and numbers the hosts by itself.
  meeting=(--rdzv-backend=c10d --rdzv-endpoint="$RDZV_ENDPOINT" --rdzv-id="${RDZV_ID:-recipe}")
elif [[ $NNODES == 1 ]]; then
  meeting=(--standalone) # a free port of this host
else
  echo "Give all hosts the same RDZV_ENDPOINT=HOST:PORT, such as RDZV_ENDPOINT=node-0:29400." >&2
  exit 2
fi

exec torchrun "${meeting[@]}" --nnodes="$NNODES" --nproc-per-node="$NPROC_PER_NODE" \
  --max-restarts="$MAX_RESTARTS" \
  -m recipes.train fit "$@" --trainer.num_nodes="$NNODES" --trainer.devices="$NPROC_PER_NODE"
