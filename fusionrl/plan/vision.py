"""What follows from a vision tower: what does not go with it, which tensors are frozen. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from fusionrl.config.config import Config
from fusionrl.config.run_parts import changes_weights
from fusionrl.models.families import model_rules
from fusionrl.models.shape import ModelShape
from fusionrl.models.trainable import frozen_tensors
from fusionrl.plan.adapters import adapters_of
from fusionrl.plan.balance import ImageCost
from fusionrl.plan.critic import auxiliary_role
from fusionrl.plan.layout import TrainerLayout, stage_layers


def vision_errors(config: Config, layout: TrainerLayout, shape: ModelShape) -> list[str]:
    """List what does not go with images, or with what is frozen, one line each. `layout` divides the model."""
    errors: list[str] = []
    try:
        frozen_of(config, shape)
    except ValueError as error:
        errors.append(str(error))
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
