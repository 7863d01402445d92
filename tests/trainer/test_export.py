"""`fusionrl export`: adapters as PEFT folders, and merged models as PEFT merges them."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fusionrl.cli import main
from fusionrl.plan.layout import TrainerLayout
from tests.trainer import trainer_worker
from tests.trainer.trainer_worker import adapter_value, config_of

Made = tuple[Path, Path, Any]


@pytest.fixture
def make_peft(hf: Any, tmp_path: Path) -> Callable[..., Made]:
    """make_peft(family, dtype, **options) -> (PEFT's folder, its base's folder, PEFT's model)."""
    from peft import LoraConfig, get_peft_model

    def make(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> Made:
        model = copy.deepcopy(hf(family, False)[1]).to(dtype)
        model.save_pretrained(tmp_path / "base")
        model.name_or_path = model.config._name_or_path = str(tmp_path / "base")
        torch.manual_seed(0)
        config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, **options)
        peft = get_peft_model(model, config)
        peft.save_pretrained(tmp_path / "adapter")
        return tmp_path / "adapter", tmp_path / "base", peft

    return make


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}], ids=str)
def test_a_merged_model_is_that_of_peft(make_peft, tmp_path, options) -> None:
    adapter, base, peft = make_peft("qwen3", **options)
    assert main(["export", str(adapter), str(tmp_path / "out"), "--merge"]) == 0
    peft.merge_and_unload().save_pretrained(tmp_path / "want")
    got, want, before = (files_of(folder) for folder in (tmp_path / "out", tmp_path / "want", base))
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert (got[name] - tensor).abs().max() <= 1e-6, name
    assert sum(not torch.equal(got[name], before[name]) for name in got) == 2 * 7
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text().count("float32") == 1


def test_a_merged_model_in_bf16_is_rounded_once(make_peft, tmp_path) -> None:
    """PEFT rounds what it adds, and then the sum."""
    adapter, base, peft = make_peft("qwen3", torch.bfloat16)
    assert main(["export", str(adapter), str(tmp_path / "out"), "--merge"]) == 0
    got, before, factors = files_of(tmp_path / "out"), files_of(base), load_file(adapter / "adapter_model.safetensors")
    names = [name for name in factors if name.endswith(".lora_A.weight")]
    for name in names:
        b, module = factors[name.replace("lora_A", "lora_B")], name.removesuffix(".lora_A.weight")
        weight = f"{module.removeprefix('base_model.model.')}.weight"
        exact = before[weight].double() + 2 * b.double() @ factors[name].double()
        assert torch.equal(got[weight], exact.bfloat16()), weight
    merged = peft.merge_and_unload().state_dict()
    errors = [(got[name].float() - merged[name].float()).abs().max() for name in got]
    assert max(errors) < 0.02, "PEFT's model is nearly the same"


def export(_: Any, *argv: str) -> str:
    """`fusionrl export` in a process that has Megatron; returns its errors."""
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        assert (main(["export", *argv]) == 0) == (not errors.getvalue())
    return errors.getvalue()


def test_an_adapter_comes_out_of_a_checkpoint_of_any_layout(workers, hf, tmp_path) -> None:
    base, _ = hf("qwen3_moe", False)
    workers.start(config_of(base, lora_rank=3), TrainerLayout(2, tp=2, ep=2, etp=1))
    workers.run(trainer_worker.draw_adapters)
    step, peft, merged, again = (str(tmp_path / name) for name in ("step", "peft", "merged", "again"))
    (tmp_path / "step").mkdir()
    workers.call("save", f"{step}/trainer", 0)
    workers.start(config_of(base))
    workers.call("save", f"{step}-full/trainer", 0)
    (found,) = workers.run(export, step, peft)
    assert found == ""
    for name, tensor in load_file(Path(peft, "adapter_model.safetensors")).items():
        assert np.array_equal(tensor.numpy(), adapter_value(name, tensor.shape)), name
    assert workers.run(export, step, merged, "--merge") == [""]
    assert main(["export", peft, again, "--merge"]) == 0
    assert (Path(again) / "model.safetensors").read_bytes() == (Path(merged) / "model.safetensors").read_bytes()
    other, _ = hf("qwen3_moe", False, seed=5)
    (found,) = workers.run(export, step, f"{merged}2", "--merge", "--hf-checkpoint", str(other))
    assert f"its weights are not those of {base}, to which the adapters belong" in found
    (found,) = workers.run(export, f"{step}-full", f"{merged}2", "--merge")
    assert "it has weights and no adapters; tools/convert.py to-hf writes them" in found
    workers.start(config_of(base, lora_rank=3, megatron_checkpoint=f"{step}-full/trainer"))
    workers.call("save", f"{step}-on-megatron/trainer", 0)
    (found,) = workers.run(export, f"{step}-on-megatron", f"{merged}2", "--merge")
    assert "is a Megatron checkpoint; give --hf-checkpoint, a folder with its weights" in found
    assert workers.run(export, f"{step}-on-megatron", f"{merged}2", "--merge", "--hf-checkpoint", str(base)) == [""]
    (tmp_path / "several" / "trainer-math").mkdir(parents=True)
    (found,) = workers.run(export, str(tmp_path / "several"), f"{merged}3")
    assert "give --adapter, one of math" in found
    assert "give a run, a checkpoint or a PEFT folder" in workers.run(export, str(tmp_path), f"{merged}3")[0]


def test_what_cannot_be_exported_is_refused(make_peft, tmp_path, capsys) -> None:
    adapter, base, _ = make_peft("qwen3")
    assert main(["export", str(adapter), str(tmp_path / "out")]) == 2
    assert main(["export", str(adapter), str(base), "--merge"]) == 2
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "gone/away"}))
    assert main(["export", str(adapter), str(tmp_path / "out"), "--merge"]) == 2
    first, second, third = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert "it is a PEFT folder already; give --merge" in first
    assert "it exists already; give another folder" in second
    assert "its base model gone/away is not a folder here; give --hf-checkpoint" in third
    assert main(["export", str(adapter), str(tmp_path / "out"), "--merge", "--hf-checkpoint", str(base)]) == 0
