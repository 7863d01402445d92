#!/usr/bin/env bash
# MiniMax-M2 (230B, 10B active), GRPO on mathematics: 8 nodes of 8 H200, at least 550 GiB host memory each.
# The published checkpoint is in block-wise fp8: trainers read it as bf16, and quantise what they push.
set -euo pipefail
source "$(dirname "$0")/common.sh"
CLUSTER=8x8xh200
MODEL=${MODEL:-MiniMaxAI/MiniMax-M2}

DEVICES=(
    --actor-num-nodes 8 --actor-num-gpus-per-node 8
    --colocate                       # states and weights need all 64 GPUs
    --rollout-num-gpus-per-engine 4  # 8 would cut an expert's 1,536 rows into less than two blocks of 128
)
LAYOUT=(
    --tensor-model-parallel-size 4                                           # 2 of 8 groups of queries a GPU
    --pipeline-model-parallel-size 4                                         # 62 layers: 15, 16, 16, 15; the ends have
    --num-layers-in-first-pipeline-stage 15 --num-layers-in-last-pipeline-stage 15  # embedding and output layer, too
    --expert-model-parallel-size 16 --expert-tensor-parallel-size 1          # 16 of 256 experts a GPU
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
    --use-tis                     # engines compute in fp8, trainers in bf16: weigh tokens by the difference
    --lr 1e-6 --weight-decay 0.1
    --save-interval 50 --keep-checkpoints 2
    --engine-start-timeout-s 1800 --distributed-timeout-minutes 60  # 230 GB are read from a shared disk
)
FLAGS=("${MATHS[@]}" "${DEVICES[@]}" "${LAYOUT[@]}" "${ROLLOUT[@]}" "${TRAINING[@]}")
start "$@"
