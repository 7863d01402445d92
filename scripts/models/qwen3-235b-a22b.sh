#!/usr/bin/env bash
# Qwen3-235B-A22B, GRPO on mathematics: 8 nodes of 8 H200, at least 550 GiB host memory each.
set -euo pipefail
source "$(dirname "$0")/common.sh"
CLUSTER=8x8xh200
MODEL=${MODEL:-Qwen/Qwen3-235B-A22B}

DEVICES=(
    --actor-num-nodes 8 --actor-num-gpus-per-node 8
    --colocate                       # states and weights need all 64 GPUs
    --rollout-num-gpus-per-engine 8  # 470 GB of weights: a node is an engine, 72 GiB a GPU remain for the KV cache
)
LAYOUT=(
    --tensor-model-parallel-size 4                                           # as many as there are groups of queries
    --pipeline-model-parallel-size 4                                         # 94 layers: 23, 24, 24, 23; the ends have
    --num-layers-in-first-pipeline-stage 23 --num-layers-in-last-pipeline-stage 23  # embedding and output layer, too
    --expert-model-parallel-size 16 --expert-tensor-parallel-size 1          # 8 of 128 experts a GPU
    --max-tokens-per-gpu 18432                                               # the longest sample, 2,048 + 16,384
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
    --engine-start-timeout-s 1800 --distributed-timeout-minutes 60  # 470 GB are read from a shared disk
)
FLAGS=("${MATHS[@]}" "${DEVICES[@]}" "${LAYOUT[@]}" "${ROLLOUT[@]}" "${TRAINING[@]}")
start "$@"
