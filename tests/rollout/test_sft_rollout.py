"""Rollouts of supervised training: conversations and prompt-response pairs as samples."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionrl.buffer.data_source import RolloutDataSource
from fusionrl.config.config import Config
from fusionrl.rollout.sft_rollout import generate_rollout


def run(tiny_model: Path, data: Path, **changes: Any) -> list[list[Any]]:
    values = {"mode": "sft", "hf_checkpoint": str(tiny_model), "prompt_data": str(data), "rollout_batch_size": 2}
    args = Config.from_flat(values | changes).to_args()
    return generate_rollout(args, 0, RolloutDataSource(args)).samples


def test_conversations(tiny_model: Path, write_rows: Callable[..., Path], tokenizer: Any) -> None:
    answer = {"role": "assistant", "content": "yes"}
    rows = [{"input": [{"role": "user", "content": f"{i}"}, answer], "metadata": {"i": i}} for i in range(3)]
    groups = run(tiny_model, write_rows(rows), n_samples_per_prompt=4)
    assert [len(group) for group in groups] == [1, 1], "each conversation is trained once"
    sample = groups[1][0]
    assert tokenizer.decode(sample.tokens[sample.prompt_length :]) == "yes<|im_end|>"
    assert (sample.metadata, sample.index, sample.group_index) == ({"i": 1}, 1, 1)


def test_prompts_with_their_responses(tiny_model: Path, write_rows: Callable[..., Path], tokenizer: Any) -> None:
    data = write_rows([{"input": "1+1=", "label": "2"}, {"input": "2+2=", "label": "4"}])
    sample = run(tiny_model, data, label_key="label")[0][0]
    assert tokenizer.decode(sample.tokens) == "1+1=2<|im_end|>"
    assert (sample.prompt_length, list(sample.loss_mask)) == (4, [1, 1])
    with pytest.raises(ValueError, match="--label-key"):
        run(tiny_model, data)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_another_end_token_of_the_model_ends_a_response_too(
    file: str, tiny_model: Path, tmp_path: Path, write_rows: Callable[..., Path], tokenizer: Any
) -> None:
    """Qwen's files name <|im_end|> and <|endoftext|>, Llama 3's three: engines stop at each. It is trained once."""
    start, end = (tokenizer.convert_tokens_to_ids(text) for text in ("<|im_start|>", "<|im_end|>"))
    model = shutil.copytree(tiny_model, tmp_path / "model")
    values = json.loads((model / file).read_text()) if (model / file).exists() else {}
    (model / file).write_text(json.dumps(values | {"eos_token_id": [end, start]}))
    for said, wanted in (
        ("2<|im_start|>\n", "2<|im_start|>"),
        ("2", "2<|im_end|>"),
        ("2<|im_end|>", "2<|im_end|>"),
    ):
        data = write_rows([{"input": "1+1=", "label": said}] * 2)
        sample = run(model, data, label_key="label")[0][0]
        assert tokenizer.decode(sample.tokens) == f"1+1={wanted}" and sample.response_length == 2


def test_the_way_of_the_loss_mask(tiny_model: Path, write_rows: Callable[..., Path], tokenizer: Any) -> None:
    said = [{"role": role, "content": f"{i}"} for i, role in enumerate(["user", "assistant"] * 2)]
    said[1]["step_loss_mask"] = 0  # type: ignore[assignment]
    data = write_rows([{"input": said}])
    for kind in ("auto", "prefix", "chatml"):
        sample = run(tiny_model, data, loss_mask_type=kind)[0][0]
        assert tokenizer.decode(sample.tokens[sample.prompt_length :]) == "3<|im_end|>"
    with pytest.raises(ValueError, match=r"conversation 0: --loss-mask-type llama3 gives no right loss mask"):
        run(tiny_model, data, loss_mask_type="llama3")
