#!/usr/bin/env bash
# A run on several nodes under Slurm: Ray's symmetric run starts Ray on each node, and the command on the first one.
#
#   sbatch --nodes=4 scripts/cluster/slurm.sh bash scripts/models/glm-4.5-air.sh
#
# The command finds the cluster's address in RAY_ADDRESS. The recipes take it from there, and the run's folder from RUN_DIR.
# A job that is requeued, or submitted again with the same RUN_DIR, resumes from the last checkpoint if its command has
# --resume. docs/guides/multinode.md
#SBATCH --job-name=fusionrl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --requeue
# Ten minutes before the end Slurm signals this shell, which signals the run; it saves a checkpoint and ends.
#SBATCH --signal=B:USR1@600
set -euo pipefail

[ $# -gt 0 ] || {
    echo "slurm.sh: error: give the command: sbatch --nodes=4 slurm.sh bash scripts/models/glm-4.5-air.sh" >&2
    exit 2
}
cd "${SLURM_SUBMIT_DIR:?run this with sbatch}"
export PATH="${FUSIONRL_VENV:-$PWD/.venv}/bin:$PATH"

# The first node by its address: a name may lead to another network on the other nodes.
names=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head_name=${names%%$'\n'*} # not by head, which may end before scontrol does
head=$(srun --nodes=1 --ntasks=1 --nodelist="$head_name" hostname -I | cut -d' ' -f1)
# Jobs that share a node would meet at one port.
export RAY_ADDRESS="$head:$((20000 + SLURM_JOB_ID % 10000))"
# Whoever reaches a cluster without a token can run code in it. srun hands the environment on, so no command line has it.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN
export RAY_worker_niceness=${RAY_worker_niceness:-0} # at 15, Ray's default, all else comes first
export RUN_DIR=${RUN_DIR:-runs/slurm-$SLURM_JOB_ID}
# Hundreds of nodes take longer than Ray's 30 seconds to start.
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=${RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT:-300}
export RAY_USAGE_STATS_ENABLED=0

# The command's process and its exit status, on the disk that all nodes see. Symmetric run is a client of the cluster that
# it ends, and often dies with it: then its own exit status is 1, whatever the command's was.
note=$PWD/.slurm-$SLURM_JOB_ID
trap 'rm -f "$note.pid" "$note.status"' EXIT
rm -f "$note.pid" "$note.status"

# Only the command gets the signal: a signal for Ray itself would end the run before it has saved.
# shellcheck disable=SC2329 # the trap calls it
tell() {
    [ -s "$note.pid" ] || return 0
    # One that has just ended cannot be told; that must not end this shell before it has read the exit status.
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$head_name" kill -TERM "$(cat "$note.pid")" || true
}
trap tell USR1 TERM

read -ra start_flags <<<"${RAY_START_FLAGS:-}"
# shellcheck disable=SC2016 # the node expands it
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \
    ray symmetric-run --address "$RAY_ADDRESS" --min-nodes "$SLURM_JOB_NUM_NODES" "${start_flags[@]}" -- \
    bash -c '"$@" & echo $! >"$0.pid"; wait $!; echo $? >"$0.status"' "$note" "$@" &
step=$!
code=0
while :; do
    wait "$step" && code=0 || code=$?
    kill -0 "$step" 2>/dev/null || break # else a signal has ended the wait, and not the step
done
[ ! -s "$note.status" ] || code=$(cat "$note.status")
exit "$code"
