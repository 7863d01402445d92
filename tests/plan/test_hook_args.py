"""slime's names in `args` have the run's values."""

from __future__ import annotations

from pathlib import Path

from fusionrl.config.config import Config
from fusionrl.models.shape import read_model_shape
from fusionrl.plan.plan import make_plan


def test_names_of_slime_have_the_run_s_values(tiny_model: Path) -> None:
    values = {"hf_checkpoint": str(tiny_model), "rollout_batch_size": 4, "rollout_max_context_len": 64}
    config = Config.from_flat(
        {**values, "prompt_data": "p.jsonl", "rm_type": "exact", "disable_rewards_normalization": True}
    )
    shape = read_model_shape(tiny_model)
    answers = make_plan(config, shape, device="cpu", num_prompts=8).answers
    args = config.to_args(**answers)
    assert args.rollout_num_engines >= 1 and args.rollout_num_gpus >= 1
    assert args.eval_max_context_len == 64 and args.over_sampling_batch_size == 4
    assert args.grpo_std_normalization is True and args.rewards_normalization is False
    assert args.use_wandb is False and args.router_policy == "cache_aware" and args.multimodal_keys is None
    assert (args.num_layers, args.hidden_size, args.vocab_size) == (
        shape.num_layers,
        shape.hidden_size,
        shape.vocab_size,
    )
    assert args.num_experts is None and args.untie_embeddings_and_output_weights is not shape.tie_word_embeddings
    assert args.rm_type == "exact", "a flag of the run stays"
