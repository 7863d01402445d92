#!/usr/bin/env bash
# Qwen3-8B as an agent that computes with Python over several turns: one node of 8 H100 (80 GB), at least 50 GiB host
# memory. Programs of the model run in the sandbox (docs/guides/sandbox.md).
set -euo pipefail
source "$(dirname "$0")/common.sh"
CLUSTER=1x8xh100
MODEL=${MODEL:-Qwen/Qwen3-8B}

DATASET=(
    --prompt-data "${DATA:-train.jsonl}" --input-key prompt --label-key label --apply-chat-template
    --rm-type math_verify  # finds the final answer, in a box or not
)
AGENT=(
    --custom-generate-function-path plugins.agents.retool.generate  # your own tools: docs/guides/agents.md
    --max-turns 8 --max-tool-response-len 1024
    --rollout-max-context-len 16384  # prompt, turns and tool answers together: what a sample may have
    --rollout-max-response-len 4096  # one turn
    --sample-timeout 900             # a tool or an answer that hangs fails its sample, not the run
)
DEVICES=(
    --actor-num-nodes 1 --actor-num-gpus-per-node 4
    --rollout-num-gpus 4 --rollout-num-gpus-per-engine 1  # tools leave engines idle: colocated, the trainers would wait too
)
LAYOUT=(
    --tensor-model-parallel-size 4  # 4 trainers hold the optimizer of 8
    --max-tokens-per-gpu 16384      # the longest sample
)
PIPELINE=(
    --pipeline async-partial --max-staleness 2  # samples differ in length by their turns: nobody waits for the last one
)
ROLLOUT=(
    --rollout-batch-size 64 --n-samples-per-prompt 8 --rollout-max-prompt-len 2048
    --num-rollout 300 --rollout-shuffle
)
TRAINING=(
    --advantage-estimator grpo --eps-clip-high 0.28
    --lr 1e-6 --weight-decay 0.1
    --save-interval 50 --keep-checkpoints 2
)
FLAGS=("${DATASET[@]}" "${AGENT[@]}" "${DEVICES[@]}" "${LAYOUT[@]}" "${PIPELINE[@]}" "${ROLLOUT[@]}" "${TRAINING[@]}")
start "$@"
