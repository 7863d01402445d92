"""Texts that a model has no positions for are found before the run: to the token, and in seconds."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusionrl.buffer.data_source import RolloutDataSource
from fusionrl.checks import lengths
from fusionrl.checks.data import NUM_CANDIDATES, DataCheck, most_bytes
from fusionrl.checks.lengths import context_length, first_over, flag_length_errors, length_errors
from fusionrl.config.config import Config, PassThrough
from fusionrl.data.columns import PromptColumns
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.models.shape import read_model_shape
from fusionrl.rollout.sft_rollout import generate_rollout
from tests.clock import here_s
from tests.trainer import hf_models

Rows = Callable[..., Path]
POSITIONS = 2048  # of the tiny model, whose tokenizer makes a token of each byte
Errors = Callable[..., list[str]]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.fixture
def errors(tiny_model: Path) -> Errors:
    """errors(field=value, …) -> messages, of an rl run with responses of at most 1,024 tokens."""

    def find(sglang: dict[str, Any] | None = None, **changes: Any) -> list[str]:
        values = {"hf_checkpoint": str(tiny_model), "rollout_max_response_len": 1024} | changes
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
        config = Config.from_flat(plain, PassThrough(sglang=sglang or {}))
        return length_errors(config, read_model_shape(config.model.hf_checkpoint or ""))

    return find


def one(found: list[str], *parts: str) -> None:
    assert len(found) == 1, found
    assert all(part in found[0] for part in parts), found


def test_sparse_attention_is_refused_beyond_its_top_k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever positions config.json has: trainers and engines attend to all keys."""
    sizes = hf_models.COMMON | hf_models.SPARSE["deepseek_v32"] | {"max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"model_type": "deepseek_v32"}))
    config = Config.from_flat({"hf_checkpoint": str(tmp_path), "rollout_max_context_len": 65}, PassThrough())
    (error,) = flag_length_errors(config, read_model_shape(tmp_path))
    assert "--rollout-max-context-len 65 is over the model's 64 positions; lower it" in error
    why = "Beyond index_topk 64 deepseek_v32 chooses keys (DSA), which no trainer or engine here does"
    assert error.endswith(why)
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    config = Config.from_flat({"hf_checkpoint": str(tmp_path)}, PassThrough(sglang={"context_length": 65}))
    (error,) = flag_length_errors(config, read_model_shape(tmp_path))
    assert error == f"--sglang-context-length 65 is over the model's 64 positions; lower it. {why}"


def test_positions_are_counted_as_sglang_counts_them() -> None:
    from fusionrl.base import cpu_wing

    cpu_wing.install_stand_ins()
    from sglang.srt.utils.hf_transformers.common import get_context_length

    yarn = {"rope_type": "yarn", "factor": 4.0}
    linear, dynamic = {"rope_type": "linear", "factor": 2.5}, {"type": "dynamic", "factor": 2.0}
    more = yarn | {"original_max_position_embeddings": 4096}
    for scaling in (None, {"rope_type": "default"}, LLAMA3, yarn, more, linear, dynamic):
        config = SimpleNamespace(max_position_embeddings=4096, rope_scaling=scaling)
        assert context_length(4096, scaling) == get_context_length(config), scaling


def test_prompts_to_the_token(errors: Errors, write_rows: Rows) -> None:
    """A prompt and its response have exactly as many tokens as there are positions, or one more."""
    rows = [{"input": "x" * length} for length in (3, 1024, 9)]
    assert errors(prompt_data=write_rows(rows)) == []
    long = write_rows([*rows, {"input": "x" * 1025}], "long.jsonl")
    told = f"--prompt-data {long}: line 4: a prompt of 1025 tokens + --rollout-max-response-len 1024 = 2049, over"
    one(errors(prompt_data=long), told, "--rollout-max-prompt-len 1024", "--rollout-max-context-len 2048")
    cures = ({"rollout_max_prompt_len": 1024}, {"rollout_max_response_len": 1023}, {"rollout_max_context_len": 2048})
    unread = ({"rollout_function_path": "a.b"}, {"debug_train_only": True})  # no default rollout reads them
    assert [errors(prompt_data=long, **flags) for flags in (*cures, *unread)] == [[]] * 5
    assert errors(prompt_data=write_rows(rows, "short.jsonl"), rollout_max_prompt_len=2000) == []
    assert errors(prompt_data=write_rows([{"input": "ж" * 1024}, {"input": "x"}], "wide.jsonl")) != []


def test_messages_by_the_chat_template(errors: Errors, write_rows: Rows, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "x" * 1000}]
    made = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    count = len(tokenizer.encode(made, add_special_tokens=False))
    data = write_rows([{"input": messages}])
    fitting = {"prompt_data": data, "apply_chat_template": True, "rollout_max_response_len": POSITIONS - count}
    assert errors(**fitting) == []
    one(errors(**fitting | {"rollout_max_response_len": POSITIONS - count + 1}), f"a prompt of {count} tokens")


def test_other_limits_of_a_sample(errors: Errors, write_rows: Rows, tiny_model: Path, tmp_path: Path) -> None:
    data = write_rows([{"input": "x" * 900}])
    assert errors(prompt_data=data) == []
    one(errors({"context_length": 1900}, prompt_data=data), "= 1924, over --sglang-context-length 1900")
    assert errors({"context_length": 1900, "allow_auto_truncate": True}, prompt_data=data) == []
    one(errors({"context_length": 4000}, prompt_data=data), "--sglang-context-length 4000 is over the model's 2048")
    one(errors(prompt_data=data, max_tokens_per_gpu=1900), "= 1924, over --max-tokens-per-gpu 1900 x --context-par")
    long = write_rows([{"input": "x" * 3000}], "long.jsonl")
    assert len(errors({"context_length": 4000}, prompt_data=long)) == 2
    one(errors(prompt_data=long, max_tokens_per_gpu=2048), "over the 2048 positions of --hf-checkpoint; leave long")
    assert errors(prompt_data=data, max_tokens_per_gpu=1924, tensor_model_parallel_size=4) == []
    # A sample is padded to a multiple of 8 tokens, of which two ranks have 1928, and not 1924.
    ranks = {"context_parallel_size": 2, "tensor_model_parallel_size": 2}
    assert [len(errors(prompt_data=data, max_tokens_per_gpu=most, **ranks)) for most in (962, 964)] == [1, 0]
    assert errors(prompt_data=data, max_tokens_per_gpu=1900, mode="reject-sampling") == []
    one(errors(prompt_data=data, rollout_max_response_len=2048), "--rollout-max-response-len 2048 leaves no room")
    one(errors(prompt_data=data, rollout_max_context_len=5000), "--rollout-max-context-len 5000 is over", "2048 posit")
    small = shutil.copytree(tiny_model, tmp_path / "small")
    raw = json.loads((small / "config.json").read_text()) | {"max_position_embeddings": 1500}
    (small / "config.json").write_text(json.dumps(raw))
    teacher = {"use_opd": True, "opd_teacher_load": small}
    one(errors(prompt_data=data, **teacher), "= 1924, over the 1500 positions of --opd-teacher-load")
    one(errors(prompt_data=data, rm_model=small), "over the 1500 positions of --rm-model")
    assert errors(prompt_data=data, rm_model=small, rm_input="chat") == []
    one(errors(prompt_data=data, advantage_estimator="prime", prm_load=small), "the 1500 positions of --prm-load")


def test_what_a_data_source_of_ones_own_gives(errors: Errors) -> None:
    own = {"data_source_path": "a.Source", "prompt_data": "anything"}
    assert errors(**own) == errors(**own, rollout_max_prompt_len=1024) == []
    said = "--rollout-max-prompt-len 1025 + --rollout-max-response-len 1024 = 2049"
    one(errors(**own, rollout_max_prompt_len=1025), said)


def test_evaluation_sets(errors: Errors, write_rows: Rows, tmp_path: Path) -> None:
    data = write_rows([{"q": "x" * 1100}])
    sets = {"eval_prompt_data": ["held-out", str(data)], "eval_input_key": "q", "mode": "eval"}
    one(errors(**sets), f"--eval-prompt-data {data}: line 1: a prompt of 1100 tokens + --rollout-max-response-len 1024")
    assert errors(**sets, eval_max_response_len=948) == []
    one(errors(**sets, eval_max_response_len=949), "--eval-max-response-len 949 = 2049")
    assert errors(**sets | {"mode": "reject-sampling"}) == []
    one(errors(**sets | {"mode": "rl"}, max_tokens_per_gpu=9999), "--eval-prompt-data")
    file = tmp_path / "eval.yaml"
    file.write_text(f"datasets: [{{name: a, path: {data}, input_key: q, max_response_len: 1000}}]")
    where = f"--eval-config {file}: set a: {data}: line 1: "
    one(errors(mode="eval", eval_config=file), where, "max_response_len 1000")


def test_conversations(errors: Errors, write_rows: Rows) -> None:
    def chat(length: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * length}]

    rows = [{"messages": chat(20)}, {"messages": chat(1900)}]
    sft = {"mode": "sft", "input_key": "messages"}
    assert errors(**sft, prompt_data=write_rows(rows)) == []
    data = write_rows([*rows, {"messages": chat(2100)}], "long.jsonl")
    one(errors(**sft, prompt_data=data), f"{data}: line 3: it has 21", "over the 2048 positions", "leave it out")
    short = write_rows(rows, "rows.jsonl")
    one(errors(**sft, prompt_data=short, max_tokens_per_gpu=1024), "line 2: it has 19", "over --max-tokens-per-gpu")
    one(errors(**sft, prompt_data=data, max_tokens_per_gpu=2048), "over the 2048 positions", "; leave it out, or")
    one(errors(**sft, prompt_data=short, eval_prompt_data=["v", str(data)]), f"--eval-prompt-data {data}: line 3")
    texts = write_rows([{"q": "x" * 1000, "a": "y" * 1048}], "texts.jsonl")  # and the token that ends it
    one(errors(mode="sft", input_key="q", label_key="a", prompt_data=texts), "it has 2049 tokens")


TURNS = [{"role": role, "content": text} for role, text in (("user", "1+1="), ("assistant", "2"))]
SUPERVISED = {
    "text": {"q": "1+1=", "a": "2"},
    "text with the end token": {"q": "1+1=", "a": "2<|im_end|>"},
    "text with another end token": {"q": "1+1=", "a": "2<|im_start|>\n"},
    "conversation": {"q": TURNS},
    "turn without a loss": {"q": [TURNS[0], TURNS[1] | {"weight": 0}, *TURNS, TURNS[0]]},
    "tokens": {"q": TURNS, "tokens": [5, 6, 7, 8, 3], "loss_mask": [0, 1, 0, 1, 1]},
}


@pytest.mark.parametrize("kind", SUPERVISED)
def test_lengths_are_those_of_the_samples_that_are_trained(
    kind: str, errors: Errors, write_rows: Rows, tiny_model: Path, tmp_path: Path
) -> None:
    """A sample of N tokens fits into N; the plan, `data check` and the rollout count the same."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    tokenizer = load_tokenizer(str(model))
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    flags = {"hf_checkpoint": str(model), "mode": "sft", "input_key": "q", "rollout_batch_size": 1}
    flags |= {"prompt_data": str(write_rows([{"a": "no"} | SUPERVISED[kind]])), "label_key": "a"}
    args = Config.from_flat(flags).to_args()
    sample = generate_rollout(args, 0, RolloutDataSource(args)).samples[0][0]
    check = DataCheck(PromptColumns("q", "a"), tokenizer, is_sft=True)
    assert check.problems(flags["prompt_data"]) == ([], [])
    assert check.lengths == [sample.num_tokens] and check.num_trained == [sum(sample.loss_mask)]
    assert errors(**flags, max_tokens_per_gpu=sample.num_tokens) == []
    one(errors(**flags, max_tokens_per_gpu=sample.num_tokens - 1), f"it has {sample.num_tokens} tokens")


@pytest.mark.parametrize(
    "bad",
    [
        '{"q": "%s' % ("x" * 9000),
        {"q": "x" * 9000, "a": 3},
        {"q": [{"role": "user", "content": "x" * 9000}], "a": ""},
        {"q": [TURNS[0], {"role": "assistant", "content": "x" * 9000, "weight": 2}], "a": ""},
        {"q": TURNS, "a": "x" * 9000, "metadata": "no object"},
        {"q": "\ud800" * 3000, "a": "\ud800"},
    ],
)
def test_bad_rows_hide_no_long_one(bad: object, errors: Errors, write_rows: Rows) -> None:
    data = write_rows([bad, {"q": "x" * 1000, "a": "y" * 1048}, bad])
    one(errors(mode="sft", input_key="q", label_key="a", prompt_data=data), "line 2: it has 2049 tokens")


@pytest.mark.timed
def test_many_rows_take_seconds(errors: Errors, tmp_path: Path) -> None:
    """Short ones are never tokenized, and of long ones only the longest."""
    data = tmp_path / "many.jsonl"
    text = "a line of a prompt that stands in many rows " * 10
    with data.open("w") as out:
        for number in range(40_000):
            out.write(json.dumps({"input": f"{number} {text}"}) + "\n")
        out.write(json.dumps({"input": "x" * 1025}) + "\n")
    start = time.perf_counter()
    one(errors(prompt_data=data), "line 40001: a prompt of 1025 tokens")
    assert time.perf_counter() - start < here_s(10)  # 1 s on a machine that does nothing else


def test_the_budget_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(f"line {i}", {"input": "x" * (300 + i)}) for i in range(1000)]
    candidates = most_bytes(iter(rows), ("input", None, "none"))
    assert len(candidates) == NUM_CANDIDATES
    assert [place for _, place, _ in candidates[:2]] == ["line 999", "line 998"]
    counted: list[str] = []

    def count(row: dict[str, Any]) -> int:
        counted.append(row["input"])
        return 1

    assert first_over(candidates, 100, count) is None and len(counted) == NUM_CANDIDATES
    monkeypatch.setattr(lengths, "BUDGET_S", -1.0)
    assert first_over(candidates, 100, count) is None and len(counted) == NUM_CANDIDATES
