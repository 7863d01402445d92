#!/usr/bin/env bash
# Reinforcement learning of a tiny model that sees, on this machine, with the real parts, in about two minutes:
# SFT -> GRPO, with an evaluation before and after it. Usage: bash scripts/vision-quickstart.sh [SEED] [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup-env.sh
PATH="$(cd "${FUSIONRL_VENV:-.venv}/bin" && pwd):$PATH"
export PATH
seed=${1:-1}
out=${2:-runs/vision-quickstart-$(date +%Y%m%d-%H%M%S)}

say() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
# Print a command as a person would type it, then run it.
run() {
    printf '$'
    printf ' %q' "$@" | sed "s/ --/ \\\\\n      --/g"
    printf '\n'
    "$@"
}

say "a model of 0.6 M parameters, and pictures whose shapes it counts (seed $seed)"
run python tools/make_vision_quickstart.py --out "$out" --seed "$seed"

task=(--input-key problem --label-key answer --multimodal-keys '{"image": "images"}')

say "1 of 2: supervised training, until the model is right now and then"
run fusionrl train --mode sft --run-dir "$out/sft" --hf-checkpoint "$out/model" --seed "$seed" "${task[@]}" \
    --prompt-data "$out/sft.parquet" --rollout-shuffle \
    --rollout-batch-size 32 --num-rollout 40 --lr 2e-3 --lr-warmup-iters 10 \
    --no-save --save-hf "$out/sft-model"

say "2 of 2: GRPO, rewarded for right answers"
run fusionrl train --mode rl --run-dir "$out/grpo" --hf-checkpoint "$out/sft-model" --seed "$seed" "${task[@]}" \
    --prompt-data "$out/train.parquet" --rollout-shuffle --rollout-seed "$seed" --apply-chat-template --rm-type exact \
    --rollout-batch-size 16 --n-samples-per-prompt 8 --rollout-max-response-len 4 --num-rollout 60 --lr 1e-3 --colocate \
    --eval-prompt-data held-out "$out/eval.parquet" --eval-temperature 0 --eval-interval 30 --no-save

say "look at the answers next to the pictures"
run fusionrl view "$out/grpo"
