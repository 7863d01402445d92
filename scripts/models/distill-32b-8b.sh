#!/usr/bin/env bash
# On-policy distillation of Qwen3-32B into Qwen3-8B: one node of 8 H100 (80 GB), at least 47 GiB host memory.
# The student samples; the teacher says the log-prob of each token (docs/guides/algorithms.md).
set -euo pipefail
source "$(dirname "$0")/common.sh"
CLUSTER=1x8xh100
MODEL=${MODEL:-Qwen/Qwen3-8B}
TEACHER=${TEACHER:-Qwen/Qwen3-32B}

DATASET=(
    --prompt-data "${DATA:-train.jsonl}" --input-key prompt --apply-chat-template  # no label: there is no reward
)
DEVICES=(
    --actor-num-nodes 1 --actor-num-gpus-per-node 4
    --rollout-num-gpus 2 --rollout-num-gpus-per-engine 1
)
DISTILLATION=(
    --use-opd --opd-type sglang --opd-teacher-load "$TEACHER"
    --opd-teacher-num-gpus 2 --opd-teacher-num-gpus-per-engine 2  # 65 GB of weights: half on each of two GPUs
    --rollout-temperature 1                                       # engines read a text at temperature 1
)
LAYOUT=(
    --tensor-model-parallel-size 4  # 4 trainers hold the optimizer of 8
    --max-tokens-per-gpu 16384      # several samples of the longest kind, 2,048 + 4,096
)
ROLLOUT=(
    --pipeline one-step-off  # the next batch is generated and read by the teacher while this one trains
    --rollout-batch-size 128 --n-samples-per-prompt 4
    --rollout-max-prompt-len 2048 --rollout-max-response-len 4096
    --num-rollout 200 --rollout-shuffle
)
TRAINING=(
    --advantage-estimator grpo --lr 2e-6 --weight-decay 0.1  # the rewards are 0: the teacher alone teaches
    --save-interval 50 --keep-checkpoints 2
)
FLAGS=("${DATASET[@]}" "${DEVICES[@]}" "${DISTILLATION[@]}" "${LAYOUT[@]}" "${ROLLOUT[@]}" "${TRAINING[@]}")
unset EVAL_DATA  # it would need a reward: give --rm-type and --eval-prompt-data as further flags
start "$@"
