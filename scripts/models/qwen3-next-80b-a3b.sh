#!/usr/bin/env bash
# Qwen3-Next-80B-A3B (gated delta nets in three of four layers), GRPO on mathematics: 4 nodes of 8 H200,
# at least 450 GiB host memory each.
set -euo pipefail
source "$(dirname "$0")/common.sh"
CLUSTER=4x8xh200
MODEL=${MODEL:-Qwen/Qwen3-Next-80B-A3B-Instruct}

DEVICES=(
    --actor-num-nodes 4 --actor-num-gpus-per-node 8
    --colocate                       # states and weights need all 32 GPUs
    --rollout-num-gpus-per-engine 4  # 160 GB of weights; keys and values are in 12 of 48 layers, and small
)
LAYOUT=(
    --tensor-model-parallel-size 2                                   # as many as there are groups of queries
    --expert-model-parallel-size 16 --expert-tensor-parallel-size 1  # 32 of 512 experts a GPU
    --max-tokens-per-gpu 18432                                       # the longest sample, 2,048 + 16,384
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
ROLLOUT=(
    --rollout-batch-size 128 --n-samples-per-prompt 8
    --rollout-max-prompt-len 2048 --rollout-max-response-len 16384
    --num-rollout 300 --rollout-shuffle
)
TRAINING=(
    --advantage-estimator gspo    # ratios of whole sequences: a router's single flips weigh less (arXiv:2507.18071)
    --use-rollout-routing-replay  # trainers use the experts that the engine chose (arXiv:2510.11370)
    --lr 1e-6 --weight-decay 0.1
    --save-interval 50 --keep-checkpoints 2
    --engine-start-timeout-s 1800 --distributed-timeout-minutes 60  # 160 GB are read from a shared disk
)
FLAGS=("${MATHS[@]}" "${DEVICES[@]}" "${LAYOUT[@]}" "${ROLLOUT[@]}" "${TRAINING[@]}")
start "$@"
