#!/usr/bin/env bash
# Qwen2.5-VL-7B, GRPO on geometry3k, tower trained: one node of 8 H100 (80 GB), at least 250 GiB host memory.
# DATA: geometry3k with a request for the answer's form (docs/guides/vision.md).
set -euo pipefail
source "$(dirname "$0")/common.sh"
CLUSTER=1x8xh100
MODEL=${MODEL:-Qwen/Qwen2.5-VL-7B-Instruct}

DEVICES=(
    --actor-num-nodes 1 --actor-num-gpus-per-node 8
    --colocate                       # on-policy: each side gets all 8 GPUs while it works
    --rollout-num-gpus-per-engine 1  # 17 GB of weights, tower included
)
LAYOUT=(
    --tensor-model-parallel-size 2   # divides the text model; each rank has the tower whole
    --max-tokens-per-gpu 8192        # room for several samples, the longest has 2,048 + 4,096
    --image-max-pixels 1003520       # 1,280 tokens of 28 x 28 pixels: an image never fills the prompt
)
ROLLOUT=(
    --rollout-batch-size 128 --n-samples-per-prompt 8  # siblings share the image: it passes the tower once
    --rollout-max-prompt-len 2048 --rollout-max-response-len 4096
    --num-rollout 240 --rollout-shuffle                # 2,101 rows: 15 epochs
)
TRAINING=(
    --advantage-estimator grpo
    --lr 1e-6 --weight-decay 0.1
    --save-interval 50 --keep-checkpoints 2
)
FLAGS=("${GEOMETRY[@]}" "${DEVICES[@]}" "${LAYOUT[@]}" "${ROLLOUT[@]}" "${TRAINING[@]}")
start "$@"
