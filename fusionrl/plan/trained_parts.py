"""What of a model is trained: all of it, adapters (--lora-rank), or what is not frozen; and what goes with images.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Literal

from fusionrl.base.wording import attempt
from fusionrl.config.config import Config
from fusionrl.config.engine_groups import engine_groups
from fusionrl.config.pipeline import keeps_groups_in_flight
from fusionrl.config.run_parts import changes_weights, uses_engines, uses_trainers
from fusionrl.models.families import get_family, model_rules
from fusionrl.models.shape import ModelShape
from fusionrl.models.trainable import Adapted, AdapterSpec, base_identity, checked_spec, frozen_tensors, sample_rules
from fusionrl.pipeline.knobs import Knobs
from fusionrl.plan.costs import ImageCost
from fusionrl.plan.layout import TrainerLayout, stage_layers
from fusionrl.plan.trainer_plan import auxiliary_role

AdapterPush = Literal["adapter", "merged"]
_OLDER_IN_FLIGHT = 3  # versions of running requests where a rollout function never lets its groups end

_MERGE = "merge the adapter into its base (`fusionrl export --merge`) and give the result as --hf-checkpoint"

POLICY = "policy"
"""Name of the only adapter, where --lora-adapters names none."""


def adapters_of(config: Config, shape: ModelShape) -> AdapterSpec | None:
    """Return the adapters that are trained, or that engines serve as they are; None: the weights.

    Raises ValueError as `checked_spec`.
    """
    lora = config.lora
    if not lora.lora_rank:
        return None
    spec = AdapterSpec(
        rank=lora.lora_rank,
        alpha=lora.lora_alpha,
        use_rslora=lora.lora_use_rslora,
        dropout=lora.lora_dropout,
        targets=tuple(lora.target_modules),
        excluded=tuple(lora.exclude_modules),
    )
    return checked_spec(spec, shape)


def adapted_of(config: Config, shape: ModelShape) -> Adapted | None:
    """Return what checkpoints have of a run with adapters, with the identity of their base; None: they have weights.

    Raises ValueError as `checked_spec`, and if the base cannot be read.
    """
    spec, model = adapters_of(config, shape), config.model
    if spec is None:
        return None
    base = str(model.megatron_checkpoint or model.hf_checkpoint)
    return Adapted(adapters=spec, base=base, identity=None if model.debug_random_weights else base_identity(base))


def adapter_folders(config: Config) -> dict[str, str | None]:
    """Return the name of each adapter → the PEFT folder that it starts from; {} without adapters."""
    lora = config.lora
    if not lora.lora_rank:
        return {}
    named = [spec.partition("=") for spec in lora.lora_adapters]
    return {name: folder or None for name, _, folder in named} or {POLICY: lora.lora_adapter_path}


def has_several_adapters(config: Config) -> bool:
    return len(adapter_folders(config)) > 1


def adapter_push(config: Config, shape: ModelShape) -> tuple[AdapterPush, str] | None:
    """Return what engines get of a run with adapters, and why in words; None: no adapters, or no engines.

    Raises:
        ValueError: --lora-push adapter, several adapters, or those of a run without trainers, which these engines
            cannot take.
    """
    spec = adapters_of(config, shape)
    if spec is None or not uses_engines(config):
        return None
    asked = config.lora.lora_push if uses_trainers(config) else "auto"
    reason = "--lora-push merged" if asked == "merged" else next(_merge_reasons(config, shape, spec), None)
    if reason is None:
        return "adapter", "engines add it to each product, and no request waits for a push"
    if not uses_trainers(config):
        raise ValueError(f"--lora-rank {spec.rank}: no trainer merges the adapter, and {reason}; {_MERGE}")
    if has_several_adapters(config):
        raise ValueError(f"--lora-adapters: requests name one of several, and merged weights have none: {reason}")
    if asked == "adapter":
        raise ValueError(f"--lora-push adapter: {reason}; give --lora-push merged or leave the flag out")
    return "merged", reason


def _merge_reasons(config: Config, shape: ModelShape, spec: AdapterSpec) -> Iterator[str]:
    """Yield why engines cannot take adapters under a name."""
    if config.cluster.rollout_external_engine_addrs:
        yield "engines that others have started do not know names of versions"
    if not get_family(shape.model_type).engines_join:
        yield f"engines run transformers' own {shape.model_type}, which takes no adapters"
    common = config.passthrough.sglang
    settings = [common, *(common | group.server_args for group in engine_groups(config))]
    if any(args.get("speculative_algorithm") for args in settings):
        yield "engines that speculate draft with the weights alone"
    if any(int(args.get("tokenizer_worker_num") or 1) > 1 for args in settings):
        yield "with several tokenizer workers an engine has no place that knows the current version"
    if any(group.role in ("prefill", "decode") for group in engine_groups(config)):
        yield "a pair of engines would prefill with one version and decode with another"
    if shape.vision is not None:
        yield "engines take no adapters of models that see"
    # In a mixture SGLang gives the adapters of a dense layer's MLP, or of shared experts, to the experts too; attention
    # between delta nets has a gate, which SGLang's adapters do not expect.
    kinds_of_layers = shape.attention, shape.mlp
    served = {name for kinds in kinds_of_layers for name in frozenset.intersection(*(k.engine_adapters for k in kinds))}
    if other := sorted(target_modules(shape, spec) - served):
        yield f"engines take no adapters on {', '.join(other)} of a {shape.model_type} model (--exclude-modules)"


def target_modules(shape: ModelShape, spec: AdapterSpec) -> set[str]:
    """Return the Hugging Face names of the modules that have an adapter: `q_proj`."""
    return {name.split(".")[-3] for layer in sample_rules(shape, spec) for rule in layer for name in rule.hf}


def adapter_slots(config: Config, knobs: Knobs | None) -> int:
    """Return how many adapters an engine serves at once: of each name all versions that may run, and the weights alone.

    A request keeps the version that it began with, so those in flight have as many as --max-staleness lets them.
    """
    num_versions = knobs.num_versions if knobs else 1 + (_OLDER_IN_FLIGHT if keeps_groups_in_flight(config) else 1)
    num_versions = num_versions if uses_trainers(config) else 1
    return len(adapter_folders(config)) * num_versions + 1


def vision_errors(config: Config, layout: TrainerLayout, shape: ModelShape) -> list[str]:
    """List what does not go with images, or with what is frozen, one line each. `layout` divides the model."""
    errors: list[str] = []
    attempt(errors, lambda: frozen_of(config, shape))
    if shape.vision is None:
        return errors
    role, algorithm = auxiliary_role(config), config.algorithm
    reasons = {
        "--enable-mtp-training: these layers would read embeddings of placeholders": bool(shape.mtp_layers),
        "--apply-rope-fusion: fused kernels know one position a token": bool(
            config.passthrough.transformer.get("apply_rope_fusion")
        ),
        f"a {role}: it has no vision tower": role is not None,
        "--opd-type sglang: the teacher's engine gets text alone": algorithm.use_opd and algorithm.opd_type == "sglang",
    }
    errors += [f"--multimodal-keys with {reason}; leave one out" for reason, holds in reasons.items() if holds]
    depth, count = len(shape.vision.deepstack), _first_layers(layout, shape, config.passthrough.transformer)
    if count is not None and count < depth:
        errors.append(
            f"the first of the model's {layout.pp * layout.vpp} pipeline pieces has {count} layers, but features of"
            f" images enter the first {depth}; give a smaller --pipeline-model-parallel-size, fewer virtual stages, or"
            " --num-layers-in-first-pipeline-stage"
        )
    return errors


def _first_layers(layout: TrainerLayout, shape: ModelShape, transformer: Mapping[str, object]) -> int | None:
    """Layers of the piece that has the embedding; None if a Megatron layout string says which."""
    stages = stage_layers(layout, shape.num_layers, transformer)
    return None if stages is None else len(stages[0]) // layout.vpp


def trains_tower(config: Config, shape: ModelShape) -> bool:
    """Return whether some tensor of the vision tower is trained."""
    tower = {rule.megatron for rule in model_rules(shape).values() if rule.is_vision}
    return changes_weights(config) and not tower <= frozen_of(config, shape)


def image_cost(config: Config, shape: ModelShape) -> ImageCost | None:
    """Return what images cost a run's trainers; None for a model that sees none."""
    return None if shape.vision is None else ImageCost.of_shape(shape.vision, trains_tower(config, shape))


def max_image_tokens(config: Config, shape: ModelShape) -> int | None:
    """Return the image tokens that --max-patches-per-gpu lets into a micro-batch; None: no limit."""
    patches = config.train.max_patches_per_gpu
    return None if shape.vision is None or patches is None else max(patches // shape.vision.merge**2, 1)


def frozen_of(config: Config, shape: ModelShape) -> frozenset[str]:
    """Return the Megatron names of the parameters of the model that are not trained: with adapters, all.

    Raises ValueError as `frozen_tensors` and `adapters_of`.
    """
    if adapters_of(config, shape) is not None:
        return _all_parameters(shape)
    train = config.train
    lists = tuple(train.freeze_params_name_list), tuple(train.only_train_params_name_list)
    return frozen_tensors(shape, *lists, train.freeze_vision and shape.vision is not None)


@lru_cache(maxsize=4)
def _all_parameters(shape: ModelShape) -> frozenset[str]:
    return frozenset(name for name, rule in model_rules(shape).items() if not rule.buffer)
