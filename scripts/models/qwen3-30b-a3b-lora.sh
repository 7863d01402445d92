#!/usr/bin/env bash
# Qwen3-30B-A3B, GRPO on mathematics with adapters on all linear layers, experts too: one node of 8 H100 (80 GB),
# at least 180 GiB host memory.
set -euo pipefail
source "$(dirname "$0")/common.sh"
CLUSTER=1x8xh100
MODEL=${MODEL:-Qwen/Qwen3-30B-A3B}

DEVICES=(
    --actor-num-gpus-per-node 8
    --colocate                       # trainers hold 8 GiB of weights a GPU, and little else
    --rollout-num-gpus-per-engine 2  # 61 GB of weights: on one GPU the KV cache would have 10 GiB
)
LAYOUT=(
    --tensor-model-parallel-size 4                                  # as many as there are groups of queries
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1  # 16 whole experts a GPU
    --max-tokens-per-gpu 10240                                      # the longest sample, 2,048 + 8,192; no recompute
)
ADAPTERS=(
    --lora-rank 8        # an episode carries few bits: docs/guides/adapters.md
    --lora-push merged   # engines take no adapters on experts
    --lr 5e-5            # adapters learn at about ten times the rate of full training, or more
)
ROLLOUT=(
    --rollout-batch-size 64 --n-samples-per-prompt 8
    --rollout-max-prompt-len 2048 --rollout-max-response-len 8192
    --num-rollout 300 --rollout-shuffle
)
TRAINING=(
    --advantage-estimator gspo      # ratios of whole sequences: a router's single flips weigh less (arXiv:2507.18071)
    --use-rollout-routing-replay    # trainers use the experts that the engine chose (arXiv:2510.11370)
    --save-interval 50 --keep-checkpoints 2
)
FLAGS=("${MATHS[@]}" "${DEVICES[@]}" "${LAYOUT[@]}" "${ADAPTERS[@]}" "${ROLLOUT[@]}" "${TRAINING[@]}")
start "$@"
