#!/usr/bin/env bash
# Qwen3.5-35B-A3B (gated delta nets in three of four layers), GRPO on mathematics: 2 nodes of 8 H100 (80 GB),
# at least 400 GiB host memory each.
set -euo pipefail
source "$(dirname "$0")/common.sh"
CLUSTER=2x8xh100
MODEL=${MODEL:-Qwen/Qwen3.5-35B-A3B}

DEVICES=(
    --actor-num-nodes 2 --actor-num-gpus-per-node 8
    --colocate                       # states and weights need all 16 GPUs
    --rollout-num-gpus-per-engine 2  # 69 GB of weights; keys and values are in 10 of 40 layers, and small
)
LAYOUT=(
    --tensor-model-parallel-size 2                                  # as many as there are groups of queries
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1  # 32 of 256 experts a GPU, inside a node
    --max-tokens-per-gpu 10240                                      # the longest sample, 2,048 + 8,192
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
ROLLOUT=(
    --rollout-batch-size 128 --n-samples-per-prompt 8
    --rollout-max-prompt-len 2048 --rollout-max-response-len 8192
    --num-rollout 300 --rollout-shuffle
)
TRAINING=(
    --advantage-estimator gspo    # ratios of whole sequences: a router's single flips weigh less (arXiv:2507.18071)
    --use-rollout-routing-replay  # trainers use the experts that the engine chose (arXiv:2510.11370)
    --lr 1e-6 --weight-decay 0.1
    --save-interval 50 --keep-checkpoints 2
)
FLAGS=("${MATHS[@]}" "${DEVICES[@]}" "${LAYOUT[@]}" "${ROLLOUT[@]}" "${TRAINING[@]}")
start "$@"
