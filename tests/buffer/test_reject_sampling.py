"""Accepted samples: the best of each prompt, none twice, and every sample counted once."""

import json
from pathlib import Path
from typing import Any

import pytest

from fusionrl.buffer.reject_sampling import AcceptedSamples
from fusionrl.config.config import Config
from fusionrl.data.columns import PromptColumns
from fusionrl.data.prompts import check_file, load_conversations
from fusionrl.data.row_checks import RowChecker
from fusionrl.data.sample import Sample, Status, response_mask
from fusionrl.rollout.sft_rollout import to_sft_sample
from fusionrl.rollout.weight_versions import _ATTRIBUTE


def sample(group: int, response: str, status: Status = Status.COMPLETED) -> Sample:
    messages = [{"role": "user", "content": f"p{group}"}]
    return Sample(group_index=group, prompt=f"p{group}", response=response, status=status, messages=messages)


def rows(accepted: AcceptedSamples) -> list[dict[str, Any]]:
    return [json.loads(line) for line in accepted.path.read_text().splitlines()]


@pytest.fixture
def accepted(tmp_path: Path) -> AcceptedSamples:
    return AcceptedSamples(tmp_path / "out.jsonl", threshold=0.5, per_prompt=1)


def test_each_sample_is_counted_once(tmp_path: Path) -> None:
    accepted = AcceptedSamples(tmp_path / "out.jsonl", threshold=0.5, per_prompt=2)
    samples = [
        *(sample(0, "good"), sample(0, "best"), sample(0, "best"), sample(0, "third")),
        *(sample(1, "bad"), sample(1, "cut off", Status.TRUNCATED), sample(1, "gone", Status.ABORTED)),
        *(sample(2, "good"),),
    ]
    counts = accepted.add(3, samples, [0.6, 0.9, 0.9, 0.5, 0.4, 1.0, 1.0, 0.7])
    wanted = {"considered": 8, "unfinished": 2, "unsampled": 0, "below_threshold": 1}
    wanted |= {"duplicates": 1, "surplus": 1, "accepted": 3}
    assert counts == wanted
    found = [(row["rollout_id"], row["prompt"], row["response"], row["reward"]) for row in rows(accepted)]
    assert found == [(3, "p0", "best", 0.9), (3, "p0", "good", 0.6), (3, "p2", "good", 0.7)]
    assert all(row["messages"][-1] == {"role": "assistant", "content": row["response"]} for row in rows(accepted))
    # The same prompt in another epoch, and in another process: only a new answer is accepted.
    for other in (accepted, AcceptedSamples(tmp_path / "out.jsonl", 0.5, 2)):
        assert other.add(4, [sample(0, "best")], [1.0])["duplicates"] == 1
    assert accepted.add(5, [sample(0, "new")], [1.0])["accepted"] == 1
    summary = json.loads((tmp_path / "out.jsonl.summary.json").read_text())
    assert summary["total"] == {**wanted, "considered": 10, "duplicates": 2, "accepted": 4}
    assert set(summary["steps"]) == {"4", "5", "6"} and summary["threshold"] == 0.5


def test_what_could_not_be_written_is_no_duplicate_when_it_comes_again(tmp_path: Path) -> None:
    path = tmp_path / "later" / "out.jsonl"
    accepted = AcceptedSamples(path, threshold=0.5, per_prompt=1)
    with pytest.raises(OSError, match="later"):
        accepted.add(0, [sample(0, "good")], [1.0])
    path.parent.mkdir()
    assert accepted.add(0, [sample(0, "good")], [1.0])["accepted"] == 1
    assert accepted.add(1, [sample(0, "good")], [1.0])["duplicates"] == 1


def turns(index: int, response: list[int], mask: list[int] | None, text: str) -> Sample:
    numbers: dict[str, Any] = {"group_index": index, "index": index, "status": Status.COMPLETED, "loss_mask": mask}
    messages = [{"role": "user", "content": "1+1="}]
    tokens = {"tokens": [40, 41, 42, *response], "response": text, "response_length": len(response)}
    return Sample(prompt="(rendered) 1+1=", messages=messages, **numbers, **tokens)


def test_sft_trains_on_the_tokens_that_the_model_sampled(accepted: AcceptedSamples, tiny_model: Path) -> None:
    """A tool's text between two turns stays out of the loss: sample → accepted.jsonl → sample of --mode sft."""
    samples = [
        turns(0, [1, 2, 3, 20, 21, 4], [1, 1, 1, 0, 0, 1], "13112+34=8"),
        turns(1, [20, 21, 4, 20], [0, 0, 1, 0], "12+34=8\n"),  # the environment speaks first and last
    ]
    assert accepted.add(0, samples, [1.0, 1.0])["accepted"] == 2
    for again in (accepted, AcceptedSamples(accepted.path, 0.5, 1)):
        assert again.add(1, samples, [1.0, 1.0])["duplicates"] == 2
    assert [row["response"] for row in rows(accepted)] == ["13112+34=8", "12+34=8\n"]
    assert not any("messages" in row for row in rows(accepted)), "as one message, the tool's text would be trained on"

    columns = PromptColumns("messages")
    check = check_file(accepted.path, "--prompt-data", RowChecker(columns, is_sft=True, vocab_size=50))
    assert (check.errors, check.warnings) == ([], [])
    args = Config.from_flat({"hf_checkpoint": str(tiny_model)}).to_args()
    for sample, loaded in zip(samples, load_conversations(accepted.path, columns).samples, strict=True):
        made = to_sft_sample(args, loaded)
        assert list(made.tokens) == list(sample.tokens)
        assert mask_of_all(made) == mask_of_all(sample)


def mask_of_all(sample: Sample) -> list[float]:
    return [0.0] * sample.prompt_length + response_mask(sample).tolist()


def test_a_plain_answer_is_text_and_a_users_function_has_tokens(accepted: AcceptedSamples, tmp_path: Path) -> None:
    plain = turns(0, [1, 2, 3], None, "131")
    accepted.add(0, [plain], [1.0])
    (row,) = rows(accepted)
    assert "tokens" not in row and row["messages"][-1]["content"] == "131"
    for function, keeps_tokens in (("two.py:generate", True), (None, False)):
        config = Config.from_flat({"custom_generate_function_path": function, "reject_sampling_per_prompt": 3})
        of_run = AcceptedSamples.of(config, tmp_path, 1)
        assert (of_run.keeps_tokens, of_run.per_prompt, of_run.threshold) == (keeps_tokens, 3, 1.0)
    plain.loss_mask = [1, 1, 1]
    own = AcceptedSamples(tmp_path / "own.jsonl", 0.5, 1, keeps_tokens=True)
    own.add(0, [plain], [1.0])
    (row,) = rows(own)
    assert row["tokens"] == [40, 41, 42, 1, 2, 3] and row["loss_mask"] == [0, 0, 0, 1, 1, 1]
    assert row["messages"][-1]["content"] == "131"


def test_nothing_is_accepted_without_a_token_to_train_on(accepted: AcceptedSamples) -> None:
    removed = turns(1, [1], None, "1")
    removed.remove_sample = True
    counts = accepted.add(0, [turns(0, [1, 2], [0, 0], "12"), removed], [1.0, 1.0])
    assert (counts["unfinished"], counts["accepted"]) == (2, 0)


def test_a_tools_text_without_a_mask_is_not_accepted(accepted: AcceptedSamples) -> None:
    """As an answer of the assistant, SFT would train on it."""
    good, wrong = sample(0, "mine"), sample(1, "mine<result>7</result>")
    vars(wrong)[_ATTRIBUTE] = 5
    counts = accepted.add(0, [good, wrong], [1.0, 1.0])
    assert (counts["unsampled"], counts["accepted"]) == (1, 1)
    assert [row["response"] for row in rows(accepted)] == ["mine"]
