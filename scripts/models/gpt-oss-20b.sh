#!/usr/bin/env bash
# gpt-oss-20B (21B, 3.6B active, windows and sinks), GRPO on mathematics: one node of 8 H100 (80 GB),
# at least 500 GiB host memory. The published experts are in MXFP4: trainers and engines have them in bf16.
set -euo pipefail
source "$(dirname "$0")/common.sh"
CLUSTER=1x8xh100
MODEL=${MODEL:-openai/gpt-oss-20b}

DEVICES=(
    --actor-num-nodes 1 --actor-num-gpus-per-node 8
    --colocate                       # states and weights need all 8 GPUs
    --rollout-num-gpus-per-engine 2  # 42 GB of weights: on one GPU the KV cache would have 25 GiB
)
LAYOUT=(
    --tensor-model-parallel-size 2                                  # 4 of 8 groups of queries a GPU
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1  # 4 of 32 experts a GPU
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
