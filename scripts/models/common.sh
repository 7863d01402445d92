# shellcheck shell=bash
# What the recipes of this folder share; docs/guides/recipes.md. A recipe sets CLUSTER, MODEL, FLAGS
# and EVALUATION (flags where EVAL_DATA is set), and calls `start "$@"`.
#
#   DATA=train.jsonl bash scripts/models/RECIPE.sh [more flags]     start the run; more flags override the recipe's
#   bash scripts/models/RECIPE.sh plan [more flags]                 plan it for its cluster: needs no GPU and no data
#
#   MODEL        folder of the model, or its name on the Hub; for `plan` a config.json is enough
#   DATA         the prompts: each row has a prompt and a label (docs/guides/data.md)
#   EVAL_DATA    held-out prompts of the same form; without it nothing is evaluated
#   RUN_DIR      folder of the run, on a disk that all nodes see
#   RAY_ADDRESS  the Ray cluster to join; needed where the recipe takes several nodes (docs/guides/multinode.md)

die() {
    echo "$(basename "$0"): error: $*" >&2
    exit 2
}

# Sets COMMON. The placement is CLUSTER's: `plan` gets the cluster, `train` the nodes.
common_flags() {
    local name nodes
    name=$(basename "$0" .sh)
    nodes=${CLUSTER%%x*}
    COMMON=(--name "$name" --hf-checkpoint "$MODEL")
    [ -z "${EVAL_DATA:-}" ] || COMMON+=(--eval-prompt-data held-out "$EVAL_DATA" "${EVALUATION[@]}")
    if [ "$1" = plan ]; then
        COMMON+=(--cluster "$CLUSTER")
        return
    fi
    # A machine whose driver does not answer would otherwise be taken for one without GPUs.
    COMMON+=(--device cuda)
    [ -z "${RUN_DIR:-}" ] || COMMON+=(--run-dir "$RUN_DIR")
    if [ -n "${RAY_ADDRESS:-}" ]; then
        COMMON+=(--ray-address "$RAY_ADDRESS")
    elif [ "$nodes" -gt 1 ]; then
        die "this recipe takes $nodes nodes: start Ray on them first, and set RAY_ADDRESS=host:port; docs/guides/multinode.md"
    fi
    [ -n "${DATA:-}" ] || [ -n "${NO_DATA:-}" ] || die "set DATA to the file of prompts"
}

start() {
    local action=train
    if [ "${1:-}" = plan ]; then
        action=plan
        shift
    fi
    common_flags "$action"
    exec fusionrl "$action" "${COMMON[@]}" "${FLAGS[@]}" "$@"
}

EVALUATION=(--eval-interval 20)
# Mathematics: rows {"prompt": …, "label": "42"}, and answers in a box. Another task: other flags behind the script's name.
# shellcheck disable=SC2034 # the recipes use it
MATHS=(--prompt-data "${DATA:-train.jsonl}" --input-key prompt --label-key label --apply-chat-template --rm-type math)
# geometry3k: rows {"images": […], "problem": "<image>…", "answer": "42"}; right or wrong, no reward for the format alone.
# shellcheck disable=SC2034
GEOMETRY=(
    --prompt-data "${DATA:-geometry3k.parquet}" --input-key problem --label-key answer
    --multimodal-keys '{"image": "images"}' --apply-chat-template --rm-type math
)
