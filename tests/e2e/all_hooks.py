"""One function of a user for every hook; each writes down that the run called it."""

from pathlib import Path
from typing import Any

from fusionrl.plugin_api import DynamicFilterOutput, RolloutDataSourceWithBuffer, Sample
from fusionrl.plugin_api import generate as plain_generate
from fusionrl.plugin_api import generate_rollout as plain_rollout


def say(args: Any, name: str) -> None:
    print(f"printed by {name}")
    with Path(args.seen).open("a") as out:
        out.write(name + "\n")


class data_source_path(RolloutDataSourceWithBuffer):
    def __init__(self, args: Any) -> None:
        say(args, "data_source_path")
        super().__init__(args)


def rollout_function_path(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    say(args, "rollout_function_path")
    data_source.add_samples(data_source.get_samples(1))  # so that there is something to filter in its buffer
    return plain_rollout(args, rollout_id, data_source, evaluation=evaluation)


def eval_function_path(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    say(args, "eval_function_path")
    return plain_rollout(args, rollout_id, data_source, evaluation=evaluation)


async def custom_generate_function_path(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    say(args, "custom_generate_function_path")
    return await plain_generate(args, sample, sampling_params)


async def custom_rm_path(args: Any, sample: Sample, **kwargs: Any) -> float:
    say(args, "custom_rm_path")
    return float(sample.response.strip() == sample.label) + 0.01 * sample.index


def rollout_sample_hook_path(
    args: Any, sample: Sample, *, rollout_id: int | None = None, evaluation: bool = False
) -> None:
    say(args, "rollout_sample_hook_path")
    sample.metadata["hooked"] = True


def dynamic_sampling_filter_path(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    say(args, "dynamic_sampling_filter_path")
    return DynamicFilterOutput(keep=True)


def buffer_filter_path(args: Any, rollout_id: int | None, buffer: list[Any], num_samples: int) -> list[Any]:
    say(args, "buffer_filter_path")
    return [buffer.pop(0) for _ in range(min(num_samples, len(buffer)))]


def rollout_sample_filter_path(args: Any, groups: list[list[Sample]]) -> None:
    say(args, "rollout_sample_filter_path")
    groups[0][0].remove_sample = True


def rollout_all_samples_process_path(args: Any, groups: list[list[Sample]], get_samples: Any) -> None:
    say(args, "rollout_all_samples_process_path")


def custom_rollout_log_function_path(
    rollout_id: int, args: Any, samples: list[Sample], metrics: dict[str, Any], time_s: float
) -> bool:
    say(args, "custom_rollout_log_function_path")
    return False


def custom_eval_rollout_log_function_path(
    rollout_id: int, args: Any, data: dict[str, Any], metrics: dict[str, Any]
) -> bool:
    say(args, "custom_eval_rollout_log_function_path")
    return False


def custom_reward_post_process_path(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    say(args, "custom_reward_post_process_path")
    raw = [float(sample.reward) for sample in samples]
    return raw, [value - 0.5 for value in raw]


def custom_convert_samples_to_train_data_path(args: Any, samples: list[Sample]) -> dict[str, list[Any]]:
    say(args, "custom_convert_samples_to_train_data_path")
    assert all(sample.metadata["hooked"] for sample in samples)
    return {
        "tokens": [list(sample.tokens) for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [sample.reward - 0.5 for sample in samples],
        "raw_reward": [sample.reward for sample in samples],
        "loss_masks": [[int(not s.remove_sample)] * s.response_length for s in samples],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "metadata": [sample.metadata for sample in samples],
        "label_of_mine": [sample.label for sample in samples],
    }


def custom_advantage_function_path(args: Any, rollout_data: dict[str, Any]) -> None:
    say(args, "custom_advantage_function_path")
    assert sum(not mask.any() for mask in rollout_data["loss_masks"]) <= 1
    rollout_data["returns"] = rollout_data["advantages"]


def rollout_data_postprocess_path(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    say(args, "rollout_data_postprocess_path")


def custom_loss_function_path(args: Any, batch: dict[str, Any], logits: Any, sum_of_sample_mean: Any) -> Any:
    import torch

    from fusionrl.plugin_api import get_log_probs_and_entropy

    say(args, "custom_loss_function_path")
    assert len(batch["label_of_mine"]) == len(batch["metadata"]) and batch["metadata"][0]["hooked"]
    names = ("unconcat_tokens", "total_lengths", "response_lengths", "starts")
    _, found = get_log_probs_and_entropy(logits, args=args, **{name: batch[name] for name in names})
    log_probs = torch.cat(found["log_probs"])
    difference = (torch.cat(batch["rollout_log_probs"]) - log_probs.detach()).abs()
    value = sum_of_sample_mean(-log_probs * torch.cat(batch["advantages"]))
    return value, {"difference_of_mine": sum_of_sample_mean(difference)}


def custom_model_provider_path(
    pre_process: bool, post_process: bool, vp_stage: Any = None, *, args: Any, usual: Any
) -> Any:
    say(args, "custom_model_provider_path")
    return usual()


def custom_spec_path(args: Any, config: Any, vp_stage: Any) -> Any:
    from fusionrl.trainer.local_layers import local_block_spec

    say(args, "custom_spec_path")
    return local_block_spec(config, vp_stage)


def custom_megatron_init_path(args: Any) -> None:
    say(args, "custom_megatron_init_path")


def custom_megatron_before_log_prob_hook_path(args: Any, model: Any, store_prefix: str) -> None:
    say(args, "custom_megatron_before_log_prob_hook_path")


def custom_megatron_before_train_step_hook_path(
    args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, scheduler: Any
) -> None:
    say(args, "custom_megatron_before_train_step_hook_path")


def custom_update_weight_post_write_path(args: Any, version_dir: str, rollout_engines: list[Any]) -> None:
    assert Path(version_dir, "manifest.json").is_file() and len(rollout_engines) == 1
    say(args, "custom_update_weight_post_write_path")


HOOKS = {name: name for name in list(globals()) if name.endswith("_path")}
"""Field of a flag → the function for it, which has the same name."""
