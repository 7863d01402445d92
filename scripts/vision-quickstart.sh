#!/usr/bin/env bash
# Reinforcement learning of a tiny model that sees, on this machine, with the real parts, in about two minutes:
# SFT -> GRPO, with an evaluation before and after it. Usage: bash scripts/vision-quickstart.sh [SEED] [FOLDER] [TASK]
# TASK zoom: the answer is visible only in a part of the picture, at which the model looks with image_zoom_in_tool.
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

task=(--multimodal-keys '{"image": "images"}')
if [ "${3:-count}" = count ]; then
    what="pictures whose shapes it counts"
    sft=(--input-key problem --label-key answer --num-rollout 40)
    rl=(--rm-type exact --rollout-max-response-len 4 --num-rollout 100 --lr 1e-3 --lr-decay-style cosine
        --eval-interval 25 --eval-temperature 0)
else
    what="pictures with patterns that it sees when it zooms in"
    task+=(--image-max-pixels 4096 --tool-key tools)
    sft=(--input-key messages --num-rollout 90)
    rl=(--custom-generate-function-path fusionrl.rollout.agent.generate --tools-path fusionrl.rollout.zoom.tools
        --tool-call-parser qwen25 --max-turns 2 --rollout-max-response-len 6 --rollout-max-context-len 256
        --rm-type last_number --num-rollout 40 --lr 5e-4 --eval-interval 20)  # sampled: the likeliest box is right from the start
fi

say "a model of 0.8 M parameters, and $what (seed $seed)"
run python tools/make_vision_quickstart.py --out "$out" --seed "$seed" --task "${3:-count}"

say "1 of 2: supervised training, until the model is right now and then"
run fusionrl train --mode sft --run-dir "$out/sft" --hf-checkpoint "$out/model" --seed "$seed" "${task[@]}" \
    --prompt-data "$out/sft.parquet" --rollout-shuffle --rollout-batch-size 32 "${sft[@]}" \
    --lr 2e-3 --lr-warmup-iters 10 --no-save --save-hf "$out/sft-model"

say "2 of 2: GRPO, rewarded for right answers"
run fusionrl train --mode rl --run-dir "$out/grpo" --hf-checkpoint "$out/sft-model" --seed "$seed" "${task[@]}" \
    --prompt-data "$out/train.parquet" --rollout-shuffle --rollout-seed "$seed" --apply-chat-template \
    --input-key problem --label-key answer --rollout-batch-size 16 --n-samples-per-prompt 8 "${rl[@]}" --colocate \
    --eval-prompt-data held-out "$out/eval.parquet" --no-save

say "look at the answers next to the pictures"
run fusionrl view "$out/grpo"
