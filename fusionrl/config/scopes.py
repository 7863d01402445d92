"""How a flag is declared: `Group`, the base of all settings, `acting`, and the scopes, which say in which runs it acts.

A field names its scopes where it stands, and all must hold. A user's own function may read any flag, so a scope holds
where one replaces the code that reads the flag.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from fusionrl.algorithms.estimators import ACCURACY, LOSSES, NONZERO_STD, PRESETS, names_where, readers_of
from fusionrl.config import run_parts

if TYPE_CHECKING:
    from fusionrl.config.config import Config

T = TypeVar("T")


@dataclass(frozen=True)
class Scope:
    """The settings in which a field acts.

    missing   what a run lacks where it does not act: of the mode ("it has no trainers"), or of the other flags, with or
              without which it acts ("without --use-kl-loss")
    holds     whether it acts in a run
    refuses   where it does not hold, a value that is not the default is an error
    """

    missing: str
    holds: Callable[[Config], bool]
    refuses: bool = False


# ------------------------------------------------------------------------------------------------ by mode
TRAINERS = Scope("it has no trainers", run_parts.uses_trainers)
ENGINES = Scope("it has no engines", run_parts.uses_engines)
PUSHES = Scope("no weights are pushed", lambda c: run_parts.uses_trainers(c) and run_parts.uses_engines(c))
TRAINS = Scope("no weights are trained", run_parts.changes_weights)
POLICY = Scope("it has no policy loss", run_parts.has_policy_loss)
GENERATES = Scope("nothing is generated to train on", run_parts.generates)
EVALUATES = Scope("engines evaluate nothing", run_parts.evaluates)
TESTS = Scope("nothing is evaluated", lambda c: run_parts.evaluates(c) or run_parts.validates(c))
STEPS = Scope("it has no steps", lambda c: c.run.mode != "eval")
TESTS_BETWEEN = Scope("nothing is evaluated between steps", lambda c: STEPS.holds(c) and TESTS.holds(c))
SAVES = Scope("nothing is saved", run_parts.saves)
PROMPTS = Scope("no prompt data is read", lambda c: STEPS.holds(c) and not c.run.load_debug_rollout_data)
ROLLOUT_FUNCTION = Scope("rollouts are read from files", lambda c: not c.run.load_debug_rollout_data)
SCORES = Scope("nothing is scored to train on or to choose from", lambda c: c.run.mode in ("rl", "reject-sampling"))
RL = Scope("no policy is trained by rewards", lambda c: c.run.mode == "rl")
SFT = Scope("it has no conversations to train on", lambda c: c.run.mode == "sft")
RENDERS = Scope(
    "conversations always go through the chat template, and text prompts are trained as plain text with their response"
    " (for the template, give messages)",
    run_parts.uses_engines,
)
NOT_SFT = Scope("nothing is sampled", lambda c: c.run.mode != "sft")
REJECTS = Scope("no samples are chosen and written", lambda c: c.run.mode == "reject-sampling")
PRESET = Scope(
    "no policy is trained by rewards",
    lambda c: (
        c.run.mode == "rl"
        or (REJECTS.holds(c) and "dynamic_sampling_filter_path" in PRESETS.get(str(c.algorithm.algorithm), {}))
    ),
)


# ------------------------------------------------------------------------------------------------ with other flags
def custom_policy_loss(config: Config) -> bool:
    """Return whether a user's function replaces the policy loss, and may read its flags."""
    return config.algorithm.custom_policy_loss_path is not None or config.algorithm.loss_type == "custom_loss"


def of_losses(field: str) -> Scope:
    """Return the scope of a flag that only some policy losses read."""
    names = readers_of(field, LOSSES)
    return Scope(
        f"without --policy-loss {' or '.join(names)}",
        lambda c: custom_policy_loss(c) or run_parts.policy_loss_name(c.algorithm) in names,
    )


def of_estimators(*names: str) -> Scope:
    """Return the scope of a flag that acts with these estimators alone."""
    *first, last = names
    listed = f"{', '.join(first)} or {last}" if first else last
    return Scope(f"without --advantage-estimator {listed}", lambda c: c.algorithm.advantage_estimator in names)


def needed(scope: Scope) -> Scope:
    """Return the same scope, which refuses a value other than the default."""
    return replace(scope, refuses=True)


def read_by_estimators(field: str) -> Scope:
    """Return the scope of a flag that only some estimators read."""
    return needed(of_estimators(*readers_of(field)))


def _moves(config: Config) -> bool:
    """Return whether the policy may have moved between the rollout and the loss: after the first step it has."""
    rollout, train = config.rollout, config.train
    total = (rollout.rollout_batch_size or 0) * rollout.n_samples_per_prompt
    is_one_step = train.num_steps_per_rollout in (None, 1) and train.global_batch_size in (None, total)
    is_asked = custom_policy_loss(config) or config.algorithm.use_rollout_logprobs
    return run_parts.is_streamed(config) or is_asked or not is_one_step


def _may_be_agent(config: Config) -> bool:
    is_custom = config.rollout.custom_generate_function_path or config.eval.eval_config
    return bool(is_custom) or run_parts.has_own_rollout(config) or run_parts.has_own_source(config)


def _warms_up(config: Config) -> bool:
    others = (config.critic.critic_lr_warmup_iters, config.prm.prm_lr_warmup_iters)
    return any((config.train.lr_warmup_iters, config.train.lr_warmup_fraction, *others))


def _corrects_itself(config: Config) -> bool:
    return config.algorithm.custom_tis_function_path is not None


CRITIC = needed(of_estimators(*names_where(lambda estimator: estimator.role == "critic")))
PRM = needed(of_estimators(*names_where(lambda estimator: estimator.role == "prm")))
MOVES = Scope("with one optimizer step a rollout (its ratio to the policy that sampled is 1)", _moves)
NOT_DPO = Scope("with --policy-loss dpo", lambda c: c.algorithm.policy_loss != "dpo")
DPO = needed(of_losses("dpo_beta"))
KL_LOSS = Scope("without --use-kl-loss", lambda c: c.algorithm.use_kl_loss)
NEEDS_KL_LOSS = needed(KL_LOSS)
REFERENCE = Scope(
    "without --use-kl-loss, --kl-coef or --policy-loss dpo (no reference model)",
    lambda c: run_parts.needs_reference(c.algorithm),
)
ESTIMATOR = Scope("with --custom-reward-post-process-path", lambda c: c.reward.custom_reward_post_process_path is None)
DEVIATION = of_estimators(*names_where(lambda estimator: estimator.plain_group is not None))
OF_SAMPLES = Scope(
    f"with --advantage-estimator {' or '.join(names_where(lambda estimator: estimator.group is None))}",
    lambda c: run_parts.estimator_of(c.algorithm).group is not None,
)
WHITENS = Scope(
    "with an --advantage-estimator that always whitens",
    lambda c: not run_parts.estimator_of(c.algorithm).is_whitened or c.algorithm.normalize_advantages,
)
AGGREGATED = Scope(
    "with --loss-aggregation or --policy-loss dpo",
    lambda c: c.run.mode != "rl" or (c.algorithm.loss_aggregation == "auto" and c.algorithm.policy_loss != "dpo"),
)
AGENT = Scope("without --custom-generate-function-path", _may_be_agent)
PARTIAL = Scope("without --partial-rollout", lambda c: c.rollout.partial_rollout)
KEEPS_SOME = Scope("without --keep-checkpoints", lambda c: c.checkpoint.keep_checkpoints is not None, refuses=True)
IN_PROCESS = Scope("without --in-process", lambda c: c.run.in_process, refuses=True)
REPLAYS = Scope("without --debug-train-only", lambda c: c.run.debug_train_only, refuses=True)
CUSTOM_REWARD = Scope("without --custom-rm-path", lambda c: c.reward.custom_rm_path is not None, refuses=True)
HAS_IMAGES = Scope("without --multimodal-keys", lambda c: bool(c.data.multimodal_keys or c.eval.eval_config))
HAS_SETS = Scope("without --eval-prompt-data or --eval-config", lambda c: c.eval.has_sets)
IS_DUE = Scope(
    "with --skip-eval-before-train and without --eval-interval",
    lambda c: c.run.mode == "eval" or c.eval.eval_interval is not None or not c.eval.skip_eval_before_train,
)
SAVING = Scope("with --no-save", lambda c: not c.checkpoint.no_save)
CHECKS_SAVES = Scope("with --no-save", lambda c: not c.checkpoint.no_save or c.run.resume)
DECAY = Scope("with --lr-decay-style constant", lambda c: c.train.lr_decay_style != "constant")
WARM_UP = Scope("without --lr-warmup-iters", _warms_up)
FURTHER = Scope("without --enable-mtp-training", lambda c: c.train.enable_mtp_training)
EPOCHS = Scope("with --num-rollout", lambda c: c.run.num_rollout is None)
COLOCATED = Scope("without --colocate", lambda c: c.cluster.colocate)
OFFLOADS = Scope("with --offload-train never", lambda c: c.cluster.offload_train != "never")
PROCESSES = Scope("with --in-process", lambda c: not c.run.in_process)
NEEDS_PROCESSES = needed(PROCESSES)
LOCAL_RAY = Scope("with --ray-address", lambda c: c.cluster.ray_address is None)
OTHER_RAY = Scope("without --ray-address", lambda c: c.cluster.ray_address is not None)
FAULT_TOLERANCE = Scope("without --use-fault-tolerance", lambda c: c.rollout.use_fault_tolerance, refuses=True)
FILTERS = Scope(
    f"without --dynamic-sampling-filter-path {ACCURACY}",
    lambda c: c.rollout.dynamic_sampling_filter_path not in (None, NONZERO_STD),
    refuses=True,
)
REWARD_MODEL = Scope("without --rm-model", lambda c: c.reward.rm_model is not None, refuses=True)
OVERLONG = Scope("without --overlong-buffer-len", lambda c: c.reward.overlong_buffer_len is not None, refuses=True)
LORA = Scope("without --lora-rank", lambda c: c.lora.lora_rank > 0, refuses=True)
PROFILED = Scope("without --profile-steps", lambda c: bool(c.run.profile_steps))
ON_GPUS = Scope("with --device cpu", lambda c: c.cluster.device != "cpu")
ON_A_CPU = Scope("with --device cuda", lambda c: c.cluster.device != "cuda")
PRICE = Scope("without --kl-coef", lambda c: c.algorithm.kl_coef > 0)
TIS = Scope("without --use-tis", lambda c: c.algorithm.use_tis or _corrects_itself(c), refuses=True)
REJECTION = Scope(
    "without --rejection-level", lambda c: bool(c.algorithm.rejection_level) or _corrects_itself(c), refuses=True
)
OPSM = Scope("without --use-opsm", lambda c: c.algorithm.use_opsm, refuses=True)
DISTILLS = Scope("without --use-opd", lambda c: c.algorithm.use_opd, refuses=True)
TEACHER_ENGINES = Scope("with --opd-type megatron", lambda c: c.algorithm.opd_type == "sglang")
CONSTANT = Scope(
    "without --loss-aggregation constant", lambda c: c.algorithm.loss_aggregation == "constant", refuses=True
)
DISK = Scope(
    "without --update-weight-transport disk", lambda c: c.weights.update_weight_transport == "disk", refuses=True
)
DELTA = Scope("without --update-weight-mode delta", lambda c: c.weights.update_weight_mode == "delta", refuses=True)
VERIFIES = Scope("with --verify-weights never", lambda c: c.weights.verify_weights != "never")


class Group(BaseModel):
    """Base of every group: strict, frozen, unknown names refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


def flags_as(kind: type[T], *groups: Group, **others: object) -> T:
    """Return a dataclass whose fields have the values of the flags of their names, but for `others`."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for group in groups for name, value in group if name in names} | others)


def _from_json(value: object) -> object:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise PydanticCustomError("json", "not valid JSON ({error})", {"error": str(error)}) from error


JsonObject = Annotated[dict[str, Any], BeforeValidator(_from_json)]


def acting(*where: Scope) -> Callable[..., Any]:
    """Return what declares flags that act where all these scopes hold: by default, help and `pydantic.Field` bounds."""

    def declare(default: object, text: str, /, **bounds: Any) -> Any:
        return Field(default, description=text, json_schema_extra={"scopes": where}, **bounds)  # type: ignore

    return declare


def scopes_of(info: FieldInfo) -> tuple[Scope, ...]:
    """Return the scopes in which a declared flag acts."""
    assert isinstance(info.json_schema_extra, dict), "a flag is declared by `acting`"
    where: Any = info.json_schema_extra["scopes"]
    return tuple(where)


always = acting()
of_engines = acting(ENGINES)
of_trainers = acting(TRAINERS)
of_training = acting(TRAINS)
of_policy = acting(POLICY)
of_rl = acting(RL)
of_rl_training = acting(TRAINS, RL)
of_pushes = acting(PUSHES)
of_steps = acting(STEPS)
of_scores = acting(SCORES)
of_prompts = acting(PROMPTS)
of_eval_engines = acting(EVALUATES, HAS_SETS)
