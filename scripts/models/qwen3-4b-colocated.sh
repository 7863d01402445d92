#!/usr/bin/env bash
# Qwen3-4B, GRPO on mathematics: one node of 8 H100 (80 GB), at least 200 GiB host memory. Engines and trainers take turns.
set -euo pipefail
source "$(dirname "$0")/common.sh"
CLUSTER=1x8xh100
MODEL=${MODEL:-Qwen/Qwen3-4B}

DEVICES=(
    --actor-num-nodes 1 --actor-num-gpus-per-node 8
    --colocate                       # on-policy: each side gets all 8 GPUs while it works
    --rollout-num-gpus-per-engine 1  # the model fits on one GPU; 8 engines share no bandwidth
)
LAYOUT=(
    --tensor-model-parallel-size 1  # the states take 28 of 80 GiB: no communication inside a layer
    --max-tokens-per-gpu 10240      # the longest sample, 2,048 + 8,192; more would not fit without recompute
)
ROLLOUT=(
    --rollout-batch-size 128 --n-samples-per-prompt 8  # 1,024 samples, and one step on all of them: exactly on-policy
    --rollout-max-prompt-len 2048 --rollout-max-response-len 8192
    --num-rollout 300 --rollout-shuffle
)
TRAINING=(
    --advantage-estimator grpo
    --lr 1e-6 --weight-decay 0.1
    --save-interval 50 --keep-checkpoints 2
)
FLAGS=("${MATHS[@]}" "${DEVICES[@]}" "${LAYOUT[@]}" "${ROLLOUT[@]}" "${TRAINING[@]}")
start "$@"
