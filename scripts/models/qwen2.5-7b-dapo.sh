#!/usr/bin/env bash
# Qwen2.5-7B with DAPO's settings (arXiv:2503.14476, section 4.1): one node of 8 H100 (80 GB), at least 250 GiB host memory.
# The paper trains Qwen2.5-32B on the data set DAPO-Math-17k, whose prompts ask for a last line "Answer: …".
set -euo pipefail
source "$(dirname "$0")/common.sh"
CLUSTER=1x8xh100
MODEL=${MODEL:-Qwen/Qwen2.5-7B}

DATASET=(
    --prompt-data "${DATA:-train.jsonl}" --input-key prompt --label-key label --apply-chat-template
    --rm-type dapo --reward-key score  # ±1, by the paper's rule
)
DEVICES=(
    --actor-num-nodes 1 --actor-num-gpus-per-node 8
    --colocate                       # the paper's run is synchronous
    --rollout-num-gpus-per-engine 1  # 15 GB of weights leave 52 GiB for the KV cache
)
LAYOUT=(
    --tensor-model-parallel-size 4  # 28 heads, 4 groups: the most; at 2 a sample of 22k fits only with recompute
    --max-tokens-per-gpu 22528      # the longest sample, 2,048 + 20,480
)
ROLLOUT=(
    --rollout-batch-size 512 --n-samples-per-prompt 16  # the paper's
    --over-sampling-batch-size 768                      # the filter drops groups that are all right or all wrong
    --num-steps-per-rollout 16                          # mini-batches of 512 samples
    --rollout-max-prompt-len 2048 --rollout-max-response-len 20480
    --num-rollout 300 --rollout-shuffle
)
TRAINING=(
    --algorithm dapo                # clip 0.2 and 0.28, token-level loss, filter, overlong penalty over the last 4,096
    --lr 1e-6 --weight-decay 0.1
    --lr-warmup-iters 320           # 20 rollouts of 16 steps
    --save-interval 20 --keep-checkpoints 2
)
EVALUATION=(--eval-interval 10 --n-samples-per-eval-prompt 32 --eval-top-p 0.7)  # the paper's avg@32
FLAGS=("${DATASET[@]}" "${DEVICES[@]}" "${LAYOUT[@]}" "${ROLLOUT[@]}" "${TRAINING[@]}")
start "$@"
