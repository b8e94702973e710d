#!/usr/bin/env bash
# A run on the machines of a Slurm job, which share this folder:
#   sbatch --nodes=4 --gpus-per-node=8 scripts/slurm.sh run --model Qwen3-8B --head eagle3 --minutes 600
# Every machine starts the same command with its own number; the first one is the master.
#SBATCH --job-name=draftsmith
#SBATCH --ntasks-per-node=1
set -euo pipefail

if [ -z "${SLURM_JOB_NODELIST:-}" ]; then
    echo "slurm.sh: no Slurm job is here: submit it, sbatch --nodes=N scripts/slurm.sh run --model … --head …" >&2
    exit 2
fi
# not piped into head: it may close the pipe while scontrol still writes, which pipefail makes an error
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
export DRAFTSMITH_MASTER="${MASTER:-${hosts%%$'\n'*}}"
# sbatch runs a copy of this file, so that the folder is the one that the job was submitted in
export PATH="${SLURM_SUBMIT_DIR:-$PWD}/.venv/bin:$PATH"
exec srun --kill-on-bad-exit=1 bash -c \
    'exec draftsmith "$@" --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --master "$DRAFTSMITH_MASTER"' draftsmith "$@"
