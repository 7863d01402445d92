#!/usr/bin/env bash
# Qwen3-30B-A3B, GRPO with answers of 32k tokens, asynchronous: 8 nodes of 8 H100 (80 GB), at least 60 GiB host memory
# each. 4 nodes train, 4 generate.
set -euo pipefail
source "$(dirname "$0")/common.sh"
CLUSTER=8x8xh100
MODEL=${MODEL:-Qwen/Qwen3-30B-A3B}

DEVICES=(
    --actor-num-nodes 4 --actor-num-gpus-per-node 8
    --rollout-num-gpus 32            # 64 GPUs suffice to split: long answers never hold the trainers up
    --rollout-num-gpus-per-engine 2  # 61 GB of weights: on one GPU the KV cache would have 10 GiB
)
LAYOUT=(
    --tensor-model-parallel-size 4                                  # as many as there are groups of queries
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1  # 16 whole experts a GPU
    --max-tokens-per-gpu 34816                                      # the longest sample, 2,048 + 32,768: with
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1  # this it needs no context parallelism
)
PIPELINE=(
    --pipeline async-partial --max-staleness 2  # an answer of 32k tokens takes several steps
)
ROLLOUT=(
    --rollout-batch-size 256 --n-samples-per-prompt 8
    --rollout-max-prompt-len 2048 --rollout-max-response-len 32768
    --num-rollout 300 --rollout-shuffle
)
TRAINING=(
    --advantage-estimator gspo  # ratios of whole sequences: a router's single flips weigh less (arXiv:2507.18071)
    --use-routing-replay        # one choice of experts for the log-prob pass and the step
    --lr 1e-6 --weight-decay 0.1
    --save-interval 50 --keep-checkpoints 2
    --use-fault-tolerance       # 16 engines: one of them may die
)
FLAGS=("${MATHS[@]}" "${DEVICES[@]}" "${LAYOUT[@]}" "${PIPELINE[@]}" "${ROLLOUT[@]}" "${TRAINING[@]}")
start "$@"
