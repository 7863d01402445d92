#!/usr/bin/env bash
# Reinforcement learning of a real (tiny) language model on this machine, with the real parts, in about three minutes:
# SFT -> eval -> GRPO -> eval through the ordinary command line.
# Usage: bash scripts/quickstart.sh [SEED] [FOLDER] [--lora-rank N]    (GRPO then trains adapters, at ten times the rate)
set -euo pipefail
rank=0 # of adapters; 0: all weights are trained
arguments=()
while (($#)); do
    case $1 in
        --lora-rank=*) rank=${1#*=} ;;
        --lora-rank) rank=${2-} && shift $(($# > 1)) ;;
        *) arguments+=("$1") ;;
    esac
    shift
done
if [[ ! $rank =~ ^[0-9]{1,4}$ ]]; then
    echo "quickstart.sh: --lora-rank '$rank' is not a number from 0 to 9999" >&2
    exit 2
fi
rank=$((10#$rank))
set -- ${arguments[@]+"${arguments[@]}"} # an empty array is an error in older bash
cd "$(dirname "$0")/.."
bash scripts/setup-env.sh
PATH="$(cd "${FUSIONRL_VENV:-.venv}/bin" && pwd):$PATH"
export PATH
seed=${1:-1}
out=${2:-runs/quickstart-$(date +%Y%m%d-%H%M%S)}

say() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
# Print a command as a person would type it, then run it.
run() {
    printf '$'
    printf ' %q' "$@" | sed "s/ --/ \\\\\n      --/g"
    printf '\n'
    "$@"
}

say "a model of 0.8 M parameters, and two-digit sums to learn (seed $seed)"
run python tools/make_quickstart.py --out "$out" --seed "$seed"

# What the two evaluations and the training share: the task, and how an answer is scored (accuracy counts exact answers).
task=(--input-key prompt --label-key label --apply-chat-template --custom-rm-path plugins.rewards.digits.reward --rollout-max-response-len 5
    --eval-prompt-data held-out "$out/eval.jsonl" --eval-temperature 0)

say "1 of 4: supervised training, until the model is right now and then"
run fusionrl train --mode sft --run-dir "$out/sft" --hf-checkpoint "$out/model" --seed "$seed" \
    --prompt-data "$out/sft.jsonl" --input-key messages --rollout-shuffle \
    --rollout-batch-size 128 --num-rollout 180 --lr 1e-3 --lr-warmup-iters 20 \
    --no-save --save-hf "$out/sft-model"

say "2 of 4: how good is it on sums it has not seen?"
run fusionrl train --mode eval --run-dir "$out/eval-sft" --hf-checkpoint "$out/sft-model" "${task[@]}"

rates=(--lr 1.2e-4 --min-lr 1e-5)
if ((rank)); then rates=(--lora-rank "$rank" --lr 1.2e-3 --min-lr 1e-4); fi

say "3 of 4: GRPO, rewarded for right digits and right answers"
run fusionrl train --mode rl --run-dir "$out/grpo" --hf-checkpoint "$out/sft-model" --seed "$seed" "${task[@]}" \
    --prompt-data "$out/train.jsonl" --rollout-shuffle --rollout-seed "$seed" \
    --rollout-batch-size 32 --n-samples-per-prompt 16 --num-steps-per-rollout 2 --num-rollout 90 \
    "${rates[@]}" --adam-beta2 0.99 --lr-decay-style linear --lr-warmup-iters 4 --colocate \
    --sglang-max-running-requests 256 \
    --skip-eval-before-train --eval-interval 30 --no-save --save-hf "$out/grpo-model"

say "4 of 4: and now?"
model=$out/grpo-model
if ((rank)); then # --save-hf has written a PEFT folder
    model=$out/merged-model
    run fusionrl export "$out/grpo-model" "$model" --merge
fi
run fusionrl train --mode eval --run-dir "$out/eval-grpo" --hf-checkpoint "$model" "${task[@]}"

say "result (seed $seed)"
python tools/quickstart_result.py "$out"
