"""`fusionrl report`: what is in the file, and that neither keys nor samples are."""

import json
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from fusionrl import cli
from fusionrl.base.environment import hide_secrets
from fusionrl.cli import report as cli_report
from fusionrl.observe.rollouts import RolloutWriter
from tests.clock import here_s

Capsys, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch
KEYS = ("topsecret-1", "hunter22", "sk-0123456789abcdefgh", "pa55word", "bearer-9", "admin-7")
SAMPLES = ("blue whales", "how many legs", "forty-six")
FUNCTIONS = f"""\
2026-11-29 01:02:03,456 buffer INFO fusionrl.buffer.actor: step 3 begins
the reward of {SAMPLES[0]} is 1
2026-11-29 01:02:03,456 buffer INFO mine: {SAMPLES[0]}
2026-11-29 01:02:04,456 buffer WARNING fusionrl: sample 3: prompt "{SAMPLES[1]}"; answer "{SAMPLES[0]}" (3 tokens, \
completed); label "{SAMPLES[2]}"; reward 0
Traceback (most recent call last):
  File "mine.py", line 3, in reward
KeyError: '{SAMPLES[0]}'
fusionrl.config.user_code.HookError: --custom-rm-path mine.py:f: KeyError: '{SAMPLES[0]}' at sample 3
2026-11-29 01:02:05,456 buffer WARNING fusionrl.engines.request_routing: http://x: the answer is refused (the body is \
not JSON: '{SAMPLES[0]}'); the request is sent once more
fusionrl.buffer.stream.GroupError: 4 groups failed; the last one: 2 of 2 samples of prompt "{SAMPLES[1]}'s" failed
fusionrl.runtime.supervisor.ActorDied: trainer rank 1 died: its process 71 ended
2026-11-29 01:02:06,456 buffer WARNING py.warnings: plugins/mine.py:12: UserWarning: no answer in '{SAMPLES[1]}'
2026-11-29 01:02:06,456 buffer WARNING py.warnings: x/site-packages/torch/a.py:9: FutureWarning: of torch
Fatal Python error: Segmentation fault
"""
ENGINE = f"""\
[2026-11-29 01:02:03] server_args=ServerArgs(api_key='{KEYS[0]}', port=30000)
[2026-11-29 01:02:03] Receive: obj=GenerateReqInput(text='{SAMPLES[1]}')
[2026-11-29 01:02:03] --admin-api-key {KEYS[5]} Authorization: Bearer {KEYS[4]} x-authorization: token {KEYS[4]} \
http://me:{KEYS[3]}@host https://host:80/x?api_key={KEYS[4]}&n=3 and {KEYS[2]}
[2026-11-29 01:02:04] Decode batch. #running-req: 7, token usage: 0.01, {KEYS[1]}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A run that has failed, in all of whose files there is what must not be in a report."""
    path = tmp_path / "run"
    RolloutWriter(path).write(2, 1, [{"prompt": SAMPLES[1], "response": SAMPLES[0], "label": SAMPLES[2]}])
    (path / "logs").mkdir()
    (path / "run.lock").touch()
    config = {"data": {"input_key": "question"}, "passthrough": {"sglang": {"api_key": KEYS[0], "tp_size": 2}}}
    (path / "config.json").write_text(json.dumps(config))
    (path / "plan.txt").write_text(f"engines: --sglang-api-key {KEYS[0]}\n")
    (path / "metrics.jsonl").write_text("".join(f'{{"step":{step},"attempt":1}}\n' for step in range(30_000)))
    error = f"failed: HookError: --custom-rm-path mine.py:f: ValueError: {SAMPLES[0]}\n{SAMPLES[1]} at sample 3"
    (path / "failure.a1.json").write_text(json.dumps({"error": error, "process": "the Buffer", "step": 3}))
    (path / "logs" / "ray.a1").mkdir()
    for name in ("driver.log", "buffer.a1.log", "trainer-0.a1.log", "ray.a1/worker-7f.out"):
        (path / "logs" / name).write_text(FUNCTIONS)
    (path / "logs" / "engine-0.log").write_text(ENGINE)
    (path / "logs" / "stall-1.a1.txt").write_text('"push" has taken 99 s\n')
    monkeypatch.setenv("MY_API_TOKEN", KEYS[1])
    monkeypatch.setenv("HF_TOKEN", KEYS[1])
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    return path


def report(folder: Path, *flags: str) -> dict[str, str]:
    """Member of the report → its text."""
    assert cli.main(["report", str(folder), *flags]) == 0
    with tarfile.open(folder / "report.tar.gz") as archive:
        files = {member.name: archive.extractfile(member) for member in archive}
        return {name.removeprefix("report/"): file.read().decode() for name, file in files.items() if file}


def test_what_a_report_has(folder: Path, capsys: Capsys) -> None:
    members = report(folder)
    assert "without samples, keys" in capsys.readouterr().out
    expected = {"versions.json", "environment.json", "config.json", "plan.txt", "metrics.jsonl", "failure.a1.json"}
    logs = {"driver.log", "buffer.a1.log", "trainer-0.a1.log", "engine-0.log", "stall-1.a1.txt", "ray.a1/worker-7f.out"}
    assert set(members) == expected | {f"logs/{name}" for name in logs}
    whole = "\n".join(members.values())
    assert not [text for text in (*KEYS, *SAMPLES) if text in whole]
    assert (
        json.loads(members["versions.json"])["python"] and json.loads(members["environment.json"])["HF_TOKEN"] == "***"
    )
    assert json.loads(members["environment.json"])["NCCL_DEBUG"] == "INFO"
    config = json.loads(members["config.json"])
    assert config["data"] == {"input_key": "question"} and config["passthrough"]["sglang"]["tp_size"] == 2
    lines = members["metrics.jsonl"].splitlines()
    assert json.loads(lines[0])["step"] > 0 and json.loads(lines[-1])["step"] == 29_999
    failure = json.loads(members["failure.a1.json"])
    assert failure == {
        "error": "failed: HookError: --custom-rm-path mine.py:f: ValueError: …",
        "process": "the Buffer",
        "step": 3,
    }
    for name in ("driver", "buffer.a1", "trainer-0.a1"):
        log = members[f"logs/{name}.log"]
        for kept in ("step 3 begins", "sample 3", 'File "mine.py", line 3, in reward', "KeyError: …", "its process 71"):
            assert kept in log, (name, kept)
        assert "plugins/mine.py:12: UserWarning: …" in log and "FutureWarning: of torch" in log
        assert "Segmentation fault" in log and "[2 lines left out: fusionrl report --with-samples]" in log
    engine = members["logs/engine-0.log"]
    assert "port=30000" in engine and "running-req: 7, token usage: 0.01" in engine and "http://me:***@host" in engine
    assert "https://host:80/x?api_key=***&n=3 and" in engine


def test_samples_come_only_by_a_flag(folder: Path) -> None:
    """Keys do not even then."""
    members = report(folder, "--with-samples")
    whole = "\n".join(members.values())
    assert all(text in whole for text in SAMPLES) and not [key for key in KEYS if key in whole]
    assert json.loads(members["rollouts/step_000003.train.a1.jsonl"])["response"] == SAMPLES[0]
    assert SAMPLES[0] in members["logs/buffer.a1.log"] and SAMPLES[0] in members["failure.a1.json"]


@pytest.mark.parametrize(
    "error",
    [
        f"failed: ValueError: sample 3: its prompt '{SAMPLES[1]}' has no tokens (label '{SAMPLES[2]}'); give its row",
        f'failed: RuntimeError: 4 groups failed; the last one: 2 of 2 samples of prompt "it\'s {SAMPLES[1]}" failed',
        f"failed: ValueError: the label '{SAMPLES[2]}…",
    ],
)
def test_errors_that_quote_samples_are_cut(error: str, folder: Path) -> None:
    (folder / "failure.a1.json").write_text(json.dumps({"error": error}))
    said = json.loads(report(folder)["failure.a1.json"])["error"]
    assert "…" in said and said.startswith(error[:24]) and not [text for text in SAMPLES if text in said]
    died = "failed: ActorDied: trainer rank 1 died: '[Errno 9]'"
    (folder / "failure.a1.json").write_text(json.dumps({"error": died}))
    assert json.loads(report(folder)["failure.a1.json"])["error"] == died


def test_mistakes(folder: Path, capsys: Capsys) -> None:
    assert cli.main(["report", str(folder / "nothing")]) == 2
    assert cli.main(["report", str(folder), "--out", str(folder / "no" / "file.tar.gz")]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_what_cannot_be_written_or_read_is_told(folder: Path) -> None:
    """Nothing is left of a report that the disk had no room for, and the one before stays."""
    (folder / "report.tar.gz").write_text("the one before")
    command = f"ulimit -f 1; exec {sys.executable} -m fusionrl.cli report {folder}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "the report cannot be written" in done.stderr and "Traceback" not in done.stderr
    assert (folder / "report.tar.gz").read_text() == "the one before" and not list(folder.glob("*.partial"))


def test_a_file_that_cannot_be_read_is_named(folder: Path, monkeypatch: Patch) -> None:
    read = cli_report._tail

    def refuses(path: Path, num_bytes: int) -> str:
        if path.name == "driver.log":
            raise PermissionError(13, "Permission denied")
        return read(path, num_bytes)

    monkeypatch.setattr(cli_report, "_tail", refuses)
    members = report(folder)
    assert members["unread.txt"] == "driver.log: Permission denied" and "step 3 begins" in members["logs/buffer.a1.log"]


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("fusionrl.foo: API_KEY=abc12345", "fusionrl.foo: API_KEY=***"),
        ("fusionrl.foo: --router-api-key abc12345 --tp 2", "fusionrl.foo: --router-api-key *** --tp 2"),
        ("--extra api_key=abc12345", "--extra api_key=***"),
        ("https://h:80/x?api_key=abc,defgh&k=2", "https://h:80/x?api_key=***&k=2"),
        ("Authorization: Bearer abc12345 and", "Authorization: *** and"),
        ("{'label_key': 'x', 'api_key': 'abc12345'}", "{'label_key': 'x', 'api_key': '***'}"),
        ("--hf-checkpoint /models/hf_qwen3_4b_instruct", "--hf-checkpoint /models/hf_qwen3_4b_instruct"),
        (f"it is hf_{'aB3' * 12}.", "it is ***."),
    ],
)
def test_secrets_are_found_behind_other_names(text: str, hidden: str) -> None:
    assert hide_secrets(text, {"label_key"}) == hidden


@pytest.mark.parametrize(
    "text", ["0" * 200_000, "-" * 200_000, "ab-" * 60_000, "a=" * 100_000, "1:" * 100_000, "?x=y&z" * 30_000]
)
def test_long_words_cost_no_more_than_other_text(text: str) -> None:
    """In quadratic time each would take minutes."""
    start = time.perf_counter()
    assert hide_secrets(text) == text
    assert time.perf_counter() - start < here_s(5.0)
