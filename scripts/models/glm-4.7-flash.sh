#!/usr/bin/env bash
# GLM-4.7-Flash (30B, 3B active, latent attention), GRPO on mathematics: 2 nodes of 8 H100 (80 GB),
# at least 350 GiB host memory each.
set -euo pipefail
source "$(dirname "$0")/common.sh"
CLUSTER=2x8xh100
MODEL=${MODEL:-zai-org/GLM-4.7-Flash}

DEVICES=(
    --actor-num-nodes 2 --actor-num-gpus-per-node 8
    --colocate                       # states and weights need all 16 GPUs
    --rollout-num-gpus-per-engine 2  # the compressed keys and values stand whole on each GPU: more GPUs hold no more
)
LAYOUT=(
    --tensor-model-parallel-size 4                                  # 5 of 20 heads a GPU; 8 does not divide them
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1  # 8 of 64 experts a GPU, inside a node
    --max-tokens-per-gpu 18432                                      # the longest sample, 2,048 + 16,384
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
    --lr 1e-6 --weight-decay 0.1
    --save-interval 50 --keep-checkpoints 2
)
FLAGS=("${MATHS[@]}" "${DEVICES[@]}" "${LAYOUT[@]}" "${ROLLOUT[@]}" "${TRAINING[@]}")
start "$@"
