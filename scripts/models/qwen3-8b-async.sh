#!/usr/bin/env bash
# Qwen3-8B, GRPO on mathematics, asynchronous: one node of 8 H100 (80 GB), at least 40 GiB host memory. Engines generate
# on 4 GPUs while 4 others train.
set -euo pipefail
source "$(dirname "$0")/common.sh"
CLUSTER=1x8xh100
MODEL=${MODEL:-Qwen/Qwen3-8B}

DEVICES=(
    --actor-num-nodes 1 --actor-num-gpus-per-node 4
    --rollout-num-gpus 4             # start with half; `perf/engines_idle` and `perf/trainers_idle` say which side to grow
    --rollout-num-gpus-per-engine 1  # 16 GB of weights leave 51 GiB for the KV cache
)
LAYOUT=(
    --tensor-model-parallel-size 4  # 4 trainers hold the optimizer of 8: at TP 2 a sample of 10k would fill 73 of 80 GiB
    --max-tokens-per-gpu 20480      # two samples of the longest kind, so that most micro-batches are full
)
PIPELINE=(
    --pipeline async-partial  # answers of 8k tokens last longer than a step: they go on under the new weights
    --max-staleness 2         # the hard bound; token weights (--use-tis) correct for it, on by default here
)
ROLLOUT=(
    --rollout-batch-size 128 --n-samples-per-prompt 8
    --rollout-max-prompt-len 2048 --rollout-max-response-len 8192
    --num-rollout 300 --rollout-shuffle
)
TRAINING=(
    --advantage-estimator grpo --eps-clip-high 0.28
    --lr 1e-6 --weight-decay 0.1
    --save-interval 50 --keep-checkpoints 2
)
FLAGS=("${MATHS[@]}" "${DEVICES[@]}" "${LAYOUT[@]}" "${PIPELINE[@]}" "${ROLLOUT[@]}" "${TRAINING[@]}")
start "$@"
