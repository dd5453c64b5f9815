#!/bin/bash
# Trains under SLURM until the run is finished, in as many jobs' time as that takes:
#
#     sbatch slurm.sh configs/deit_tiny_p8/eva.yaml data.root=/data/imagenet --output /shared/runs/eva
#
# Submit it from here, with the environment active. Two minutes before the time is up every rank receives SIGUSR1; the
# run saves and ends with status 75, and the job queues itself again. With any other status it does not, so that a run
# that fails does not come back; nor does a job that is cancelled, as SIGTERM ends this script.
#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12 --time=48:00:00
#SBATCH --signal=USR1@120 --requeue --open-mode=append

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))  # jobs may share a node
export MASTER_ADDR MASTER_PORT WORLD_SIZE=$SLURM_NTASKS OMP_NUM_THREADS=1

# srun itself starts the ranks and returns their highest status; torchrun would return 1. It does not inherit the CPUs
# (since SLURM 22.05), and ends ranks that outlive the first by a minute.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 --wait=60 \
    bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec python train.py "$@"' rank "$@"
status=$?

if ((status == 75)); then
    scontrol requeue "$SLURM_JOB_ID"
else
    exit "$status"
fi
