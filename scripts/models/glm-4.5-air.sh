#!/usr/bin/env bash
# GLM-4.5-Air (106B, 12B active), GRPO on mathematics: 4 nodes of 8 H200, at least 500 GiB host memory each.
set -euo pipefail
source "$(dirname "$0")/common.sh"
CLUSTER=4x8xh200
MODEL=${MODEL:-zai-org/GLM-4.5-Air}

DEVICES=(
    --actor-num-nodes 4 --actor-num-gpus-per-node 8
    --colocate                       # states and weights need all 32 GPUs
    --rollout-num-gpus-per-engine 4  # 50 GiB of weights a GPU leave 77 for the KV cache; 8 divides 96 heads too
)
LAYOUT=(
    --tensor-model-parallel-size 4                                   # 8 groups of queries: 2 a GPU
    --pipeline-model-parallel-size 2                                 # 46 layers are two times 23
    --expert-model-parallel-size 16 --expert-tensor-parallel-size 1  # 8 of 128 experts a GPU
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
)
FLAGS=("${MATHS[@]}" "${DEVICES[@]}" "${LAYOUT[@]}" "${ROLLOUT[@]}" "${TRAINING[@]}")
start "$@"
