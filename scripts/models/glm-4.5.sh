#!/usr/bin/env bash
# GLM-4.5 (355B, 32B active), GRPO on mathematics: 16 nodes of 8 H200, at least 450 GiB host memory each.
set -euo pipefail
source "$(dirname "$0")/common.sh"
CLUSTER=16x8xh200
MODEL=${MODEL:-zai-org/GLM-4.5}

DEVICES=(
    --actor-num-nodes 16 --actor-num-gpus-per-node 8
    --colocate                       # on-policy: both sides use all 128 GPUs
    --rollout-num-gpus-per-engine 8  # 705 GB of weights: a node is an engine, 44 GiB a GPU remain for the KV cache
)
LAYOUT=(
    --tensor-model-parallel-size 8                                   # 96 heads, 8 groups of queries: one a GPU
    --pipeline-model-parallel-size 4                                 # 92 layers are four times 23
    --expert-model-parallel-size 32 --expert-tensor-parallel-size 1  # 5 of 160 experts a GPU
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
    --engine-start-timeout-s 1800 --distributed-timeout-minutes 60  # 705 GB are read from a shared disk
)
FLAGS=("${MATHS[@]}" "${DEVICES[@]}" "${LAYOUT[@]}" "${ROLLOUT[@]}" "${TRAINING[@]}")
start "$@"
