#!/usr/bin/env bash
# Supervised training of Qwen3-8B on conversations: one node of 8 H100 (80 GB), at least 50 GiB host memory. No engines.
set -euo pipefail
source "$(dirname "$0")/common.sh"
CLUSTER=1x8xh100
MODEL=${MODEL:-Qwen/Qwen3-8B}

DATASET=(
    --mode sft
    --prompt-data "${DATA:-train.jsonl}" --input-key messages  # rows {"messages": [{"role": …, "content": …}]}
)
DEVICES=(
    --actor-num-nodes 1 --actor-num-gpus-per-node 8
)
LAYOUT=(
    --tensor-model-parallel-size 2  # as in RL, so that a checkpoint of one loads into the other without a detour
    --max-tokens-per-gpu 10240      # conversations are packed up to here; a longer one is refused by name
)
TRAINING=(
    --rollout-batch-size 256 --num-epoch 2 --rollout-shuffle  # a step is 256 conversations
    --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --lr-warmup-fraction 0.03
    --weight-decay 0.1 --adam-beta2 0.95
    --save-interval 200 --keep-checkpoints 2 --save-hf "${RUN_DIR:-runs}/qwen3-8b-sft"  # a folder that RL starts with
)
FLAGS=("${DATASET[@]}" "${DEVICES[@]}" "${LAYOUT[@]}" "${TRAINING[@]}")
unset EVAL_DATA  # there is no engine to evaluate with
start "$@"
