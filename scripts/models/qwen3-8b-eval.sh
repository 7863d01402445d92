#!/usr/bin/env bash
# Evaluation of Qwen3-8B alone: one node of 8 H100 (80 GB), at least 50 GiB host memory. No trainers.
set -euo pipefail
source "$(dirname "$0")/common.sh"
CLUSTER=1x8xh100
MODEL=${MODEL:-Qwen/Qwen3-8B}
EVAL_DATA=${EVAL_DATA:-${DATA:-eval.jsonl}}

FLAGS=(
    --mode eval
    --input-key prompt --label-key label --apply-chat-template --rm-type math
    --rollout-num-gpus 8 --rollout-num-gpus-per-engine 1     # 8 engines; one prompt's samples spread over them
    --n-samples-per-eval-prompt 16 --eval-max-response-len 32768
    --eval-temperature 0.6 --eval-top-p 0.95 --eval-top-k 20  # what the model's card recommends for thinking
)
EVALUATION=()
NO_DATA=1  # nothing is trained on
start "$@"
