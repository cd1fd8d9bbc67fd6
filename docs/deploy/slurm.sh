#!/usr/bin/env bash
# A pipeline over the nodes of a Slurm job, a stage per node:  sbatch --nodes 4 docs/deploy/slurm.sh MODEL
# MODEL must have the same path on every node, and the environment must have Brigade installed.
#SBATCH --job-name=brigade
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
set -euo pipefail

MODEL=${1:?usage: sbatch slurm.sh MODEL}
export MODEL
MASTER=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER
echo "clients connect to tcp://$MASTER:5757"

# One torchrun per node; SLURM_NODEID is different in each.
srun --kill-on-bad-exit=1 bash -c '
    exec torchrun --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --nproc-per-node 1 \
        --master-addr "$MASTER" --master-port 29500 --max-restarts 1000000 \
        -m scripts.serve "$MODEL" --dtype bfloat16 --listen tcp://0.0.0.0:5757 --insecure
'
