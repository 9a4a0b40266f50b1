#!/usr/bin/env bash
# Fully async training on several nodes: sbatch deploy/slurm.sh fully_async train.backend=fsdp ...
# The first argument is a recipe, the others are settings. Submit it from a directory that all nodes
# see, with Paceline and Ray installed in .venv there.
#SBATCH --job-name=paceline
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# The run saves its step before the time is over or the job is preempted. Slurm requeues a preempted
# job, which resumes; after the time limit, submit the job again.
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
set -euo pipefail

recipe=${1:?usage: sbatch deploy/slurm.sh RECIPE [key=value ...]}
shift
# shellcheck source=/dev/null
source .venv/bin/activate

# Ray executes the code of every client: only those with this token connect.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$PWD/.ray-token-$SLURM_JOB_ID"
(umask 077 && head -c 32 /dev/urandom | base64 >"$RAY_AUTH_TOKEN_PATH")
trap 'rm -f "$RAY_AUTH_TOKEN_PATH"' EXIT

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=$(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" hostname -I | awk '{print $1}')
port=$((20000 + SLURM_JOB_ID % 10000))

srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" --overlap \
    ray start --head --node-ip-address="$head" --port="$port" --include-dashboard=false --block &
for node in "${nodes[@]:1}"; do
    srun --nodes=1 --ntasks=1 --nodelist="$node" --overlap \
        bash -c "until ray start --address='$head:$port' --block; do sleep 2; done" &
done

# Without a limit, the job would wait for a lost node until its time is over.
srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" --overlap timeout 600 bash -c "
    until python deploy/wait_for_nodes.py '$head:$port' '${#nodes[@]}'; do sleep 2; done"

# srun forwards SIGTERM to the run, which finishes and saves its step.
srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" --overlap \
    paceline train "$recipe" cluster=ray ray.address="$head:$port" "$@" --restart 3 &
run=$!
trap 'kill -TERM "$run"' TERM
status=0
wait "$run" || status=$?
if kill -0 "$run" 2>/dev/null; then # the signal ended the first wait
    status=0
    wait "$run" || status=$?
fi
exit "$status"
