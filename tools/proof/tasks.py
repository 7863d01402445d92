"""Data and models of the stages, made from a seed: the quickstarts' tasks, models with experts, delta nets, drafts."""

import json
import shutil
from pathlib import Path

from tools import make_vision_quickstart
from tools.make_quickstart import write_quickstart


def make_task(folder: Path) -> None:
    """Write the task, unless it is there."""
    if (folder / "drafts" / "whole").is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    write_quickstart(folder, 0)
    _make(folder, "experts", "qwen3_moe", EXPERTS)
    _make(folder, "delta", "qwen3_5_text", DELTA)
    _make(folder, "drafts", "glm4_moe", DRAFTS)
    _add_further_layer(folder / "drafts")
    make_vision_quickstart.write_quickstart(folder / "vision", 0)
    (folder / "drafts" / "whole").touch()


EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
}

DRAFTS = {
    **{"moe_intermediate_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}


def _add_further_layer(folder: Path) -> None:
    """Add a layer of multi-token prediction, under the names of GLM-4.5: the last layer, and what joins its inputs."""
    import torch
    from safetensors.torch import load_file, save_file

    file, config = folder / "config.json", json.loads((folder / "config.json").read_text())
    hidden, last = config["hidden_size"], f"model.layers.{config['num_hidden_layers'] - 1}."
    further = f"model.layers.{config['num_hidden_layers']}."
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name.replace(last, further): x.clone() for name, x in tensors.items() if name.startswith(last)}
    tensors |= {
        further + name: torch.ones(hidden) for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    }
    tensors[further + "eh_proj.weight"] = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], 1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file.write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


def _make(folder: Path, name: str, model_type: str, sizes: dict[str, object]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    dense = AutoConfig.from_pretrained(folder / "model")
    config = AutoConfig.for_model(
        model_type,
        vocab_size=dense.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=dense.max_position_embeddings,
        eos_token_id=dense.eos_token_id,
        pad_token_id=dense.pad_token_id,
        **sizes,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / name)
