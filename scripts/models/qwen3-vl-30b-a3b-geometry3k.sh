#!/usr/bin/env bash
# Qwen3-VL-30B-A3B, GRPO on geometry3k, tower frozen: one node of 8 H100 (80 GB), at least 500 GiB host memory.
# DATA: geometry3k with a request for the answer's form (docs/guides/vision.md).
set -euo pipefail
source "$(dirname "$0")/common.sh"
CLUSTER=1x8xh100
MODEL=${MODEL:-Qwen/Qwen3-VL-30B-A3B-Instruct}

DEVICES=(
    --actor-num-nodes 1 --actor-num-gpus-per-node 8
    --colocate                       # the trainers' states need all 8 GPUs
    --rollout-num-gpus-per-engine 2  # 62 GB of weights
)
LAYOUT=(
    --tensor-model-parallel-size 4                                  # as many as there are groups of queries
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1  # 16 whole experts a GPU
    --max-tokens-per-gpu 8192                                       # the longest sample has 2,048 + 4,096
    --image-max-pixels 1310720                                      # 1,280 tokens of 32 x 32 pixels
    # The states of 31 B parameters leave 10 GiB; how evenly the router divides tokens is in `plan --router-imbalance`.
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
ROLLOUT=(
    --rollout-batch-size 128 --n-samples-per-prompt 8
    --rollout-max-prompt-len 2048 --rollout-max-response-len 4096
    --num-rollout 240 --rollout-shuffle
)
TRAINING=(
    --freeze-vision             # an image passes the tower once a rollout; engines keep its features over pushes
    --advantage-estimator gspo  # ratios of whole sequences: a router's single flips weigh less (arXiv:2507.18071)
    --lr 1e-6 --weight-decay 0.1
    --save-interval 50 --keep-checkpoints 2
)
FLAGS=("${GEOMETRY[@]}" "${DEVICES[@]}" "${LAYOUT[@]}" "${ROLLOUT[@]}" "${TRAINING[@]}")
start "$@"
