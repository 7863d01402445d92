"""`fusionrl doctor` on a command line: model, data, tokenizer and reward; planted faults, and silence without one."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionrl import cli
from tests.clock import here_s

Rows = Callable[..., Path]
Doctor = Callable[..., list[dict[str, str]]]
MACHINE = {"packages", "torch", "shm", "limits", "memory", "cores", "host", "disk"}


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model to spoil."""
    return shutil.copytree(tiny_model, tmp_path / "model")


@pytest.fixture
def doctor(
    model: Path, write_rows: Rows, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Doctor:
    """doctor(*flags, rows=…) -> findings of the run, with which the exit code agrees."""
    # What the machine is like has tests of its own, and takes a process that imports torch.
    monkeypatch.setattr("fusionrl.checks.doctor.examine.machine_findings", lambda *_: [])

    def call(*flags: str, rows: list[Any] | None = None) -> list[dict[str, str]]:
        data = write_rows(rows or [{"input": f"{i}+40=", "label": str(i + 40)} for i in range(8)])
        argv = ["--hf-checkpoint", str(model), "--prompt-data", str(data), "--label-key", "label", "--device", "cpu"]
        argv += ["--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "8"]
        argv += ["--num-rollout", "2", "--apply-chat-template", *flags]
        if not {"--rm-type", "--custom-rm-path"} & set(flags):
            argv += ["--rm-type", "exact"]
        code = cli.main(["doctor", "--json", *argv])
        found = json.loads(capsys.readouterr().out)
        assert code == (2 if any(finding["status"] == "fault" for finding in found) else 0)
        return found

    return call


def troubles(findings: list[dict[str, str]], check: str = "") -> list[dict[str, str]]:
    found = [finding for finding in findings if finding["status"] != "fact" and check in finding["check"]]
    assert all(finding["cure"] for finding in found)
    return found


def told(findings: list[dict[str, str]], check: str = "", status: str = "fault") -> str:
    """The only trouble."""
    (trouble,) = troubles(findings, check)
    assert trouble["status"] == status
    return trouble["fact"]


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}))


def use_template(model: Path, old: str, new: str) -> None:
    path = model / "chat_template.jinja"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_healthy_run_has_facts_alone(doctor: Doctor) -> None:
    found = doctor()
    assert not troubles(found), found
    assert {finding["check"] for finding in found} == {"flags", "estimate", "tokens", "template", "end", "reward"}
    (reward,) = [finding for finding in found if finding["check"] == "reward"]
    assert "in 3 rows (label '40': 1 for '40', 0 for an empty one)" in reward["fact"]


def test_flags_of_a_cluster_alone_are_no_run(capsys: pytest.CaptureFixture[str], doctor: Doctor) -> None:
    """Nobody listens at the address, which the machine's checks tell; they are not made here."""
    code = cli.main(["doctor", "--json", "--ray-address", "127.0.0.1:9", "--device", "cpu"])
    found = json.loads(capsys.readouterr().out)
    assert [(one["check"], one["status"]) for one in found] == [("flags", "fact"), ("ray", "fault")] and code == 2
    assert found[0]["fact"].startswith("no flags of a run") and "no Ray cluster answers there" in found[1]["fact"]


def test_a_machine_without_the_gpu_that_a_flag_of_a_cluster_asks_for(
    capsys: pytest.CaptureFixture[str], doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # a machine with GPUs has none then
    code = cli.main(["doctor", "--json", "--device", "cuda"])
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["check"], found["status"], code) == ("flags", "fault", 2)
    assert found["fact"].startswith("--device cuda: ") and "--device cpu" in found["cure"]


def test_wrong_flags_are_all_told(doctor: Doctor) -> None:
    for flags, texts in (("--global-batch-size 3 --lr x", ["--lr x", "-size 3"]), ("--config no.yaml", ["no.yaml"])):
        found = doctor(*flags.split())
        assert {finding["check"] for finding in troubles(found)} == {"flags"}
        assert all(any(text in finding["fact"] for finding in found) for text in texts)


def test_gpus_are_examined_where_flags_are_wrong(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("fusionrl.cli.device.detect_device", lambda wanted: "cuda")
    look = "fusionrl.checks.doctor.examine.machine_findings"
    monkeypatch.setattr(look, lambda examined, _: seen.append(examined.device) or [])
    assert troubles(doctor("--device", "auto", "--lr", "fast")) and seen == ["cuda"]


def test_a_model_that_does_not_fit(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusionrl.plan.devices.host_memory", lambda: 1e9)
    assert told(doctor(), "estimate").startswith("DOES NOT FIT")


def test_an_end_that_the_template_does_not_write(doctor: Doctor, model: Path) -> None:
    """A wrong template: turns end with one token, engines stop at another; each answer goes on to its limit."""
    use_template(model, "{{ m['content'] }}<|im_end|>", "{{ m['content'] }}<|endoftext|>")
    assert "ends a turn with 256 '<|endoftext|>', and engines stop only at 258" in told(doctor())
    assert not troubles(doctor("--rollout-stop-token-ids", "256"))
    edit(model / "generation_config.json", eos_token_id=[256, 258])
    assert not troubles(doctor())


def test_an_end_that_the_model_cannot_emit(doctor: Doctor, model: Path) -> None:
    edit(model / "tokenizer_config.json", eos_token=None)
    (model / "special_tokens_map.json").unlink(missing_ok=True)
    nowhere = "no file of --hf-checkpoint names a token that ends an answer"
    for token, said in ((9999, "[9999], are outside of the model's vocabulary of 512"), (None, nowhere)):
        for name in ("config.json", "generation_config.json"):
            edit(model / name, eos_token_id=token)
        assert said in told(doctor(), "end")


def test_a_template_of_another_model(doctor: Doctor, model: Path) -> None:
    use_template(model, "<|im_start|>", "<|start_header_id|>")
    assert "writes <|start_header_id|>, not as one token" in told(doctor(), status="warning")


def test_a_template_that_loses_words(doctor: Doctor, model: Path) -> None:
    use_template(model, "{{ m['content'] }}", "{{ m['content'] | upper }}")
    assert "leaves out 'How much is 17 and 25?'" in troubles(doctor())[0]["fact"]


def test_tokens_without_an_embedding(doctor: Doctor, model: Path) -> None:
    edit(model / "config.json", vocab_size=200)
    assert any("vocab" in t["fact"] or "embeddings" in t["fact"] for t in troubles(doctor()))


def test_a_begin_token_twice(doctor: Doctor, model: Path) -> None:
    edit(model / "tokenizer_config.json", bos_token="<|endoftext|>")
    rows = [{"input": "<|endoftext|><|endoftext|>1+1=", "label": "2"}] * 4
    assert "begins with <|endoftext|> twice" in told(doctor("--no-apply-chat-template", rows=rows), "bos")


def test_a_label_that_does_not_fit_into_an_answer(doctor: Doctor) -> None:
    found = doctor(rows=[{"input": "?", "label": "a long answer"}] * 4)
    assert "has 13 tokens, answers have at most 8" in told(found)


def reward_file(tmp_path: Path, body: str) -> str:
    path = tmp_path / "my_reward.py"
    path.write_text(f"import re\ndef reward(args, sample, **kw):\n    {body}\n")
    return f"{path}:reward"


def test_a_reward_that_is_always_0(doctor: Doctor, tmp_path: Path) -> None:
    path = reward_file(tmp_path, "return float(sample.response == sample.metadata.get('answer', 0))")
    said = "the gold label '40' scores 0 in each form"
    own, other = ("--custom-rm-path", path), ("--rm-type", "exact:-1")
    for flags, status in ((own, "warning"), ((*own, "--gold", "{label}"), "fault"), (other, "fault")):
        assert said in told(doctor(*flags), status=status) or "--gold" in flags


def test_a_form_of_ones_own(doctor: Doctor, tmp_path: Path) -> None:
    path = reward_file(tmp_path, "return float(sample.response.strip() == f'FINAL: {sample.label}')")
    assert troubles(doctor("--custom-rm-path", path))
    form = ("--gold", "FINAL: {label}", "--rollout-max-response-len", "16")
    assert not troubles(doctor("--custom-rm-path", path, *form))


@pytest.mark.parametrize("flags", [["--gold", "-{answer}"], ["--gold", "--json"]])
def test_a_form_without_a_label_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *flags]) == 2
    assert "--gold" in (said := capsys.readouterr().err) and "needs {label}" in said


@pytest.mark.parametrize(
    ("body", "flags", "said"),
    [
        ("return float(sample.metadata['level'] > 2)", [], "KeyError"),
        ("import time; time.sleep(60)", ["--reward-timeout-s", "0.5", "--gold", "{label}"], "no reward within 0.5 s"),
    ],
)
def test_a_reward_that_gives_nothing(doctor: Doctor, tmp_path: Path, body: str, flags: list[str], said: str) -> None:
    path = reward_file(tmp_path, body)
    fact = told(doctor("--custom-rm-path", path, *flags))
    assert said in fact and path in fact


def test_a_reward_that_gives_a_dict(doctor: Doctor, tmp_path: Path) -> None:
    path = reward_file(tmp_path, "return {'score': float(sample.response == sample.label)}")
    assert "--reward-key" in troubles(doctor("--custom-rm-path", path))[0]["cure"]
    assert not troubles(doctor("--custom-rm-path", path, "--reward-key", "score"))


def test_deep_finds_weights_that_are_no_numbers(doctor: Doctor, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    assert any(finding["check"] == "weights" for finding in doctor("--deep"))
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][0, 0] = torch.nan
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert f"the first: {name}" in told(doctor("--deep"))


@pytest.mark.timed
def test_without_deep_it_takes_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The machine that runs the tests: facts, and the exit code 0."""
    since = time.monotonic()
    code = cli.main(["doctor"])
    assert time.monotonic() - since < here_s(20)
    out = capsys.readouterr().out
    assert code == 0 and out.splitlines()[-1].endswith("no faults, no warnings"), out
    assert {line[7:].split()[0] for line in out.splitlines()[:-1]} >= MACHINE
