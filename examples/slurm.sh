#!/bin/bash
# examples/train_longnet.py on several hosts under SLURM, one torchrun per host:
#
#     sbatch --nodes 2 examples/slurm.sh @examples/longnet_base.txt --steps 1000
#
# Options behind the script's name are those of the program. Set OUT to a folder that all hosts see,
# and GPUS where a host has other than 8 GPUs, with --gpus-per-node before the script's name.
# A job that is queued again, and ranks that torchrun starts again, go on from the last checkpoint.

#SBATCH --job-name=train-longnet
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail

OUT="${OUT:-$PWD/runs/$SLURM_JOB_ID}"
GPUS="${GPUS:-8}"
PORT="${PORT:-29400}"
FIRST="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"

# Ranks that torchrun starts again get a store of their own.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# The network that hosts reach each other by, where it is not found by itself:
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

# torchrun ends with its ranks; --kill-on-bad-exit=0 leaves the other hosts to torchrun's restarts,
# and --cpu-bind=none gives all CPUs of the host to its ranks.
srun --kill-on-bad-exit=0 --cpu-bind=none torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node "$GPUS" \
    --max-restarts 3 \
    --rdzv-backend c10d \
    --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    --rdzv-endpoint "$FIRST:$PORT" \
    examples/train_longnet.py --resume --out "$OUT" "$@"
