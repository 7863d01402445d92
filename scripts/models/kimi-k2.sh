#!/usr/bin/env bash
# Kimi-K2-Instruct (1T, 32B active), GRPO on mathematics: 32 nodes of 8 H200, at least 600 GiB host memory each.
# The published checkpoint is in block-wise fp8: trainers read it as bf16, and quantise what they push. Its tokenizer is
# code: put a tokenizer.json next to it.
set -euo pipefail
source "$(dirname "$0")/common.sh"
CLUSTER=32x8xh200
MODEL=${MODEL:-moonshotai/Kimi-K2-Instruct}

DEVICES=(
    --actor-num-nodes 32 --actor-num-gpus-per-node 8
    --colocate                        # states and weights need all 256 GPUs
    --rollout-num-gpus-per-engine 16  # in fp8 two nodes are an engine: one has 121 GiB of weights on each GPU
)
LAYOUT=(
    --tensor-model-parallel-size 8    # 8 of 64 heads a GPU, inside a node
    --pipeline-model-parallel-size 8  # 61 layers: 6 at the start, 7 at the end, 8 on each stage between
    --num-layers-in-first-pipeline-stage 6 --num-layers-in-last-pipeline-stage 7
    --expert-model-parallel-size 32 --expert-tensor-parallel-size 1  # 12 of 384 experts a GPU
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
    --use-tis                     # engines compute in fp8, trainers in bf16: weigh tokens by the difference
    --lr 1e-6 --weight-decay 0.1
    --save-interval 50 --keep-checkpoints 2
    --engine-start-timeout-s 3600 --distributed-timeout-minutes 60  # 1 TB is read from a shared disk
)
FLAGS=("${MATHS[@]}" "${DEVICES[@]}" "${LAYOUT[@]}" "${ROLLOUT[@]}" "${TRAINING[@]}")
start "$@"
