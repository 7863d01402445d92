"""Data and models of the stages: the quickstart's task and a model with experts, made from a seed."""

import shutil
from pathlib import Path

from tools.make_quickstart import write_quickstart


def make_task(folder: Path) -> None:
    """Write the task, unless it is there."""
    if (folder / "experts" / "config.json").is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    write_quickstart(folder, 0)
    _make_experts(folder)


def _make_experts(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    dense = AutoConfig.from_pretrained(folder / "model")
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=dense.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        norm_topk_prob=True,
        max_position_embeddings=dense.max_position_embeddings,
        eos_token_id=dense.eos_token_id,
        pad_token_id=dense.pad_token_id,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "experts")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "experts")
