"""Names of the Hugging Face Hub: found in a cache of the real layout, downloaded from a Hub, or refused at once."""

import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from fusionrl import cli
from fusionrl.checks import hub
from fusionrl.checks.hub import CHECKPOINTS, resolve_names
from fusionrl.config.config import GROUP_OF, Config
from fusionrl.data.rows import parse_set, read_rows
from tests.clock import here_s

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROWS = [{"input": f"{i}+1=", "label": str(i + 1)} for i in range(6)]


def put_in_cache(home: Path, kind: str, name: str, files: dict[str, bytes]) -> Path:
    """Write a repository as huggingface_hub keeps it: blobs, links to them in a snapshot, and a ref to it."""
    repo = home / "hub" / f"{kind}s--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / COMMIT
    for path, content in files.items():
        blob = repo / "blobs" / hashlib.sha256(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link = snapshot / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    return snapshot


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty HF_HOME, and a Hub that nobody runs."""
    home = tmp_path / "hf"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HOME", str(home))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
    return home


def resolved(**values: Any) -> Config:
    config, errors = resolve_names(Config.from_flat(values))
    assert errors == []
    return config


def refused(**values: Any) -> str:
    _, (error,) = resolve_names(Config.from_flat(values))
    return error


@pytest.mark.parametrize("field", CHECKPOINTS)
def test_every_flag_of_a_checkpoint_takes_a_cached_name(home: Path, tiny_model: Path, field: str) -> None:
    snapshot = put_in_cache(home, "model", "Qwen/Qwen3-Tiny", files_of(tiny_model))
    config = resolved(**{field: "Qwen/Qwen3-Tiny", "seed": 3})
    assert getattr(getattr(config, GROUP_OF[field]), field) == str(snapshot)
    assert config.given() == ["seed", field]


def test_paths_stay_as_they_are(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("runs/model", "data/math"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    values = {"hf_checkpoint": "runs/model", "ref_load": "/nowhere/model", "eval_prompt_data": ["a/b", "c/d.jsonl"]}
    values |= {"prompt_data": ["data/math:train", "data/none.jsonl", "x=none.parquet@[:3]", "a/b/c.json"]}
    config = Config.from_flat(values)
    assert resolve_names(config) == (config, [])


@pytest.mark.parametrize(
    ("removed", "with_weights", "missing"),
    [
        ("model.safetensors", True, "not all of its weights"),
        ("model.safetensors", False, None),
        ("tokenizer.json", True, "no tokenizer"),
        ("config.json", True, "no config.json"),
    ],
)
def test_a_cache_with_a_part_of_a_model(
    home: Path, tiny_model: Path, removed: str, with_weights: bool, missing: str | None
) -> None:
    """A tokenizer that was loaded once leaves a folder without weights: no model to train."""
    files = files_of(tiny_model)
    del files[removed]
    put_in_cache(home, "model", "a/b", files)
    config = Config.from_flat({"hf_checkpoint": "a/b"})
    _, errors = resolve_names(config, with_weights=with_weights)
    told = f"--hf-checkpoint a/b: there is no such folder here, the local cache has {missing}, and"
    assert [told in error for error in errors] == [True] * (missing is not None)


def test_a_plan_for_a_cluster_needs_the_config_alone(
    home: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_in_cache(home, "model", "a/b", {"config.json": (tiny_model / "config.json").read_bytes()})
    flags = ["--hf-checkpoint", "a/b", "--prompt-data", "a.jsonl", "--rm-type", "exact", "--rollout-batch-size", "8"]
    flags += ["--num-rollout", "2", "--rollout-max-response-len", "9", "--colocate"]
    assert cli.main(["plan", "--cluster", "1x8xh200", *flags]) == 0
    assert "2 rollout steps" in capsys.readouterr().out
    assert cli.main(["plan", "--cluster", "1x8xh200", *flags, "--hf-checkpoint", "a/none"]) == 2
    assert "`hf download a/none --local-dir none`" in capsys.readouterr().err


def test_an_unknown_name_is_refused_at_once_with_the_command_that_gets_it(home: Path) -> None:
    start = time.perf_counter()
    error = refused(hf_checkpoint="Qwen/Qwen3-0.6B")
    assert time.perf_counter() - start < here_s(5)
    begin = "--hf-checkpoint Qwen/Qwen3-0.6B: there is no such folder here, it is not in the local cache"
    assert error.startswith(begin) and "the Hub cannot be reached" in error
    assert error.endswith("`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`, then --hf-checkpoint Qwen3-0.6B")
    error = refused(eval_prompt_data=["aime", "math-ai/aime24:test"])
    assert "`hf download math-ai/aime24 --repo-type dataset --local-dir aime24`" in error
    assert error.endswith("then --eval-prompt-data aime24:test")


def test_a_hub_that_does_not_answer_is_not_waited_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "ANSWER_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, and says nothing
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        start = time.perf_counter()
        error = refused(hf_checkpoint="a/b")
    assert time.perf_counter() - start < here_s(5)
    assert "the Hub cannot be reached" in error or "does not answer within" in error


@pytest.mark.parametrize(
    ("spec", "name", "rows"),
    [
        ("o/sums:train", "sums-train", ROWS[:4]),
        ("mine=o/sums:train@[1:3]", "mine", ROWS[1:3]),
        ("o/sums:test", "sums-test", ROWS[4:]),
        ("o/sums/hard:test", "sums-hard-test", ROWS[5:]),
        ("o/numbered/default:train", "numbered-default-train", ROWS[:3]),
    ],
)
def test_data_sets(home: Path, spec: str, name: str, rows: list[dict[str, Any]]) -> None:
    """A split in one file or in several, configurations in folders: the rows are those of the files, in order."""
    files = {
        "README.md": b"sums",
        "dataset_infos.json": b"{}",
        "data/train-00000-of-00002.jsonl": lines(ROWS[:2]),
        "data/train-00001-of-00002.jsonl": lines(ROWS[2:4]),
        "data/test-00000-of-00001.jsonl": lines(ROWS[4:]),
        "hard/test.jsonl": lines(ROWS[5:]),
    }
    put_in_cache(home, "dataset", "o/sums", files)
    put_in_cache(home, "dataset", "o/numbered", {"default/train/0000.jsonl": lines(ROWS[:3])})
    config = resolved(prompt_data=spec)
    (found,) = config.data.prompt_data or []
    assert [row for _, row in read_rows(found)] == rows
    assert parse_set(found).name == name
    plain = spec.removeprefix("mine=")
    evaluated = resolved(eval_prompt_data=["a", plain]).eval.eval_prompt_data
    assert evaluated[0] == "a" and [row for _, row in read_rows(evaluated[1])] == rows


def test_data_sets_that_cannot_be(home: Path) -> None:
    put_in_cache(home, "dataset", "o/half", {"data/train-00000-of-00002.jsonl": lines(ROWS)})
    assert "there is no such file; of a data set of the Hub" in refused(prompt_data="o/half")
    assert "the local cache has not all of o/half:train" in refused(prompt_data="o/half:train")
    put_in_cache(home, "dataset", "o/two", {"main/test.jsonl": lines(ROWS), "other/test.jsonl": lines(ROWS)})
    error = refused(prompt_data="o/two:test")
    assert error == "--prompt-data o/two: choose one of its splits: o/two/main:test, o/two/other:test"


def test_other_formats_are_read_by_the_package_datasets(home: Path) -> None:
    put_in_cache(home, "dataset", "o/table", {"train.csv": b"input,label\n1+1=,2\n2+2=,4\n"})
    for _ in range(2):  # made once, and found again
        (found,) = resolved(prompt_data="o/table:train").data.prompt_data or []
        assert [row for _, row in read_rows(found)] == [{"input": "1+1=", "label": 2}, {"input": "2+2=", "label": 4}]
    assert "the package datasets cannot read it" in refused(prompt_data="o/table:test")


@pytest.fixture
def a_hub(tiny_model: Path) -> Iterator[tuple[str, list[str]]]:
    """A server that answers as the Hub does for the model o/tiny and the data set o/sums; and what it was asked."""
    repos = {
        "models/o/tiny": {**files_of(tiny_model), "onnx/model.safetensors": b"another format", "model.bin": b"torch"},
        "datasets/o/sums": {"train.jsonl": lines(ROWS)},
    }
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.command} {self.path}")
            for repo, files in repos.items():
                start = f"/{repo.removeprefix('models/')}/resolve/{COMMIT}/"
                if self.path.split("?")[0] in (f"/api/{repo}", f"/api/{repo}/revision/main"):
                    siblings = [{"rfilename": name} for name in files]
                    return self.answer({"id": repo.split("/", 1)[1], "sha": COMMIT, "siblings": siblings})
                if self.path.startswith(f"/api/{repo}/tree/{COMMIT}"):
                    facts = {name: (len(text), hashlib.sha1(text).hexdigest()) for name, text in files.items()}
                    tree = [{"type": "file", "path": n, "size": size, "oid": oid} for n, (size, oid) in facts.items()]
                    return self.answer(tree)
                if self.path.startswith(start) and self.path.removeprefix(start) in files:
                    return self.answer(files[self.path.removeprefix(start)])
            return self.answer(b"", 404, **{"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET

        def answer(self, content: object, code: int = 200, **headers: str) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            etag = f'"{hashlib.sha1(body).hexdigest()}"'
            self.send_response(code)
            headers |= {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, "ETag": etag}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def test_a_run_by_names(
    home: Path, a_hub: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a Hub, then from its cache without one; a name that the Hub does not have is said so."""
    url, asked = a_hub
    values = {"hf_checkpoint": "o/tiny", "prompt_data": "o/sums:train@[:4]", "eval_prompt_data": ["a", "o/sums:train"]}
    with monkeypatch.context() as online:
        online.setattr(constants, "ENDPOINT", url)
        online.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        fresh, (error,) = resolve_names(Config.from_flat(values | {"ref_load": "o/none"}))
    assert "downloading o/tiny from the Hugging Face Hub" in capsys.readouterr().err
    assert error.startswith("--ref-load o/none: ") and "the Hub has no such model" in error
    assert not any("onnx" in line or ".bin" in line for line in asked if "resolve" in line)
    assert [row for _, row in read_rows(fresh.data.prompt_data[0])] == ROWS[:4]
    asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolved(**values) == fresh.model_copy(update={"model": fresh.model.model_copy(update={"ref_load": None})})
    assert asked == [] and capsys.readouterr().err == ""
