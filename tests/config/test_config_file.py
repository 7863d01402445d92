"""`--config FILE`: every kind of flag round-trips, the command line goes first, and each mistake has its line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fusionrl.config.config import FIELDS, GROUP_OF, GROUPS, Config
from fusionrl.config.parser import CommandLineError, read_args, render_template
from fusionrl.observe.run_dir import RunDir
from tests.config.flag_values import values_of


class Files:
    """Files of flags in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, text: str, suffix: str = "yaml") -> Path:
        path = self.folder / f"run.{suffix}"
        path.write_text(text, encoding="utf-8")
        return path

    def read(self, text: str, *argv: str, suffix: str = "yaml") -> Config:
        """The Config of a file without a mistake."""
        config, errors = read_args(["--config", str(self.write(text, suffix)), *argv])
        assert errors == []
        return config

    def errors(self, text: str, *argv: str, suffix: str = "yaml") -> list[str]:
        """The mistakes in a file, without its folder."""
        path = str(self.write(text, suffix))
        try:
            _, errors = read_args(["--config", path, *argv])
        except CommandLineError as error:
            errors = error.errors
        return [error.replace(f"{self.folder}/", "") for error in errors]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def test_every_flag_round_trips(files: Files) -> None:
    """YAML, TOML and JSON, with dashes and underscores, alone and under its group: as the value itself."""
    alone = ("algorithm", "custom_config_path")  # they set other fields, too
    values = {field: values_of(field, files.folder)[0] for field in FIELDS if field not in alone}
    wanted = Config.from_flat(values)
    groups = {group: {f: v for f, v in values.items() if GROUP_OF[f] == group} for group in GROUPS}
    dashes = {field.replace("_", "-"): value for field, value in values.items()}
    for text, suffix in (
        ("# a comment\n" + "".join(f"{key}: {json.dumps(value)}\n" for key, value in dashes.items()), "yml"),
        ("".join(f"{group}: {json.dumps(fields)}\n" for group, fields in groups.items()), "yaml"),
        (json.dumps(values), "json"),
        ("".join(f"{key} = {toml(value)}\n" for key, value in dashes.items()), "toml"),
        ("".join(f"{group} = {toml(fields)}\n" for group, fields in groups.items()), "toml"),
    ):
        config = files.read(text, suffix=suffix)
        assert config == wanted, suffix
        assert set(config.given()) == set(values)


KWARGS, OF_TEMPLATE = "apply-chat-template-kwargs", "apply_chat_template_kwargs"
ON = {"on": False, "mode": "no", "year": "2026-01-02", "none": None}


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("name: no", "name", "no"),
        ("name: 2026-01-02", "name", "2026-01-02"),
        ("lr: 1e-6", "lr", 1e-6),
        ("lr: '1e-6'", "lr", 1e-6),
        ("seed: 1_000", "seed", 1000),
        ("run-dir-mode: 755", "run_dir_mode", "755"),
        ("colocate: no", "colocate", False),
        ("no-save: yes", "no_save", True),
        ("rollout-stop: no", "rollout_stop", ["no"]),
        ("rollout-stop: [yes, 1.50, ~x]", "rollout_stop", ["yes", "1.50", "~x"]),
        ("rollout-stop:\n- |\n  a\n- 'b'", "rollout_stop", ["a\n", "b"]),
        ("rollout-stop-token-ids: 7", "rollout_stop_token_ids", [7]),
        ("prompt-data: a.jsonl", "prompt_data", ["a.jsonl"]),
        ("run-dir:", "run_dir", None),
        (f"{KWARGS}: '{{\"a\": 1e-3}}'", OF_TEMPLATE, {"a": 1e-3}),
        (f"{KWARGS}: {{on: no, mode: 'no', year: 2026-01-02, none: ~}}", OF_TEMPLATE, ON),
    ],
)
def test_the_flag_decides_what_a_value_means(line: str, field: str, value: Any, files: Files) -> None:
    config = files.read(line)
    assert getattr(getattr(config, GROUP_OF[field]), field) == value
    assert (field in config.given()) == (value is not None)


def test_the_command_line_goes_before_the_file(files: Files) -> None:
    text = "lr: 1e-5\ncolocate: true\nno-save: true\nrollout-stop: [a, b]\nnum-rollout: 7\nalgorithm: dapo\n"
    config = files.read(text, "--lr", "3e-5", "--no-colocate", "--no-save=false", "--rollout-stop", "c")
    assert (config.train.lr, config.cluster.colocate, config.checkpoint.no_save) == (3e-5, False, False)
    assert (config.rollout.rollout_stop, config.run.num_rollout) == (["c"], 7)
    assert files.read("eval-input-key: &key text\ninput-key: *key\n").data.input_key == "text", "an alias"
    assert config.algorithm.eps_clip_high == 0.28 and "eps_clip_high" not in config.given()
    assert files.read(text + "eps-clip-high: 0.3\n").algorithm.eps_clip_high == 0.3, "the file goes before a preset"
    assert files.read(text, "--algorithm", "gspo").algorithm.eps_clip_high == 4e-4
    path = str(files.write("lr: 1e-5"))
    assert read_args(["--lr", "2e-5", f"--config={path}"])[0].train.lr == 2e-5, "wherever --config stands"


def test_flags_of_the_parts(files: Files) -> None:
    text = "attention-dropout: 0.25\napply-rope-fusion: false\noverlap_grad_reduce: true\nrouter-log-level: warn\n"
    text += "sglang-mem-fraction-static: 0.5\nsglang-disable-radix-cache: true\nsglang-enable-mixed-chunk: false\n"
    passed = files.read(text, "--attention-dropout", "0.5").passthrough
    assert passed.transformer == {"attention_dropout": 0.5, "apply_rope_fusion": False}
    assert passed.ddp["overlap_grad_reduce"] is True and passed.router == {"log_level": "warn"}
    assert passed.sglang == {"mem_fraction_static": 0.5, "disable_radix_cache": True}
    (error,) = files.errors("\nsglang-mem-fraction-statc: 0.5")
    assert error.startswith("run.yaml:2: ") and "did you mean --sglang-mem-fraction-static?" in error


MISTAKES = (
    ("mode: grpo", "--mode grpo", "did you mean --mode rl --algorithm grpo?"),
    ("lr: fast", "--lr fast", "valid number"),
    ("", "", ""),
    ("rollout-stop-token-ids: [1, two]", "--rollout-stop-token-ids two", "valid integer"),
    ("colocate: maybe", "--colocate maybe", "write true or false"),
    ("rolout-batch-size: 8", "--rolout-batch-size", "did you mean --rollout-batch-size?"),
    ("learning_rate: 1e-6", "--learning-rate 1e-6", "TRL's name; use --lr"),
    ("num-epoch:", "", ""),
    ("lr: 1e-5", "lr", "on line 2 already"),
    ("custom_rm_path: a", "", ""),
    ("custom-rm-path: b", "custom-rm-path", "run.yaml:10 already"),
    ("no-colocate: true", "no-colocate", "write colocate: false"),
    ("--seed: 3", "--seed", "write it without the dashes in front: seed"),
    ("config: other.yaml", "config", "names no other"),
    ("name: [a, b]", "--name", "valid string"),
    ('apply-chat-template-kwargs: "{x"', "--apply-chat-template-kwargs {x", "not valid JSON"),
    ("clip-grad: ~", "--clip-grad", "it needs a value"),
    ("multimodal-keys: x", "--multimodal-keys x", "not valid JSON"),
    ("data:", "", ""),
    ("  input-key: {a: 1}", "--input-key", "valid string"),
    ("  nonsense-key-of-mine: 1", "--nonsense-key-of-mine", "unknown flag"),
    ("rollout-stop: [[a], b]", "--rollout-stop", "valid string"),
)


def test_each_mistake_has_its_line(files: Files) -> None:
    found = files.errors("\n".join(line for line, _, _ in MISTAKES), "--rollout-batch-size", "0")
    wanted = [(f"run.yaml:{n}: {start}", text) for n, (_, start, text) in enumerate(MISTAKES, 1) if start]
    wanted.append(("--rollout-batch-size 0", "greater than or equal to 1"))
    for start, text in wanted:
        assert sum(error.startswith(start) and text in error for error in found) == 1, (start, found)
    assert len(found) == len(wanted), found


# each line has nine times the last
ALIASES = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))


@pytest.mark.parametrize(
    ("text", "suffix", "start"),
    [
        ("lr: 1\n  seed: 2\n", "yaml", "run.yaml:2: it is not valid YAML"),
        ("- lr\n", "yaml", "run.yaml:1:"),
        ("[a]: 1\nlr: 1\n", "yaml", "run.yaml:1: a key is the name of a flag"),
        ("a: &x [*x]\n", "yaml", "run.yaml"),
        ("lr: \x07\n", "yaml", "run.yaml: it is not valid YAML"),
        ("lr = 1\nseed = \n", "toml", "run.toml:2: it is not valid TOML"),
        ("seed = 1\n\n[train]\nlr = 1e-6\nclip_grad = 'x'\n", "toml", "run.toml:5: --clip-grad x"),
        ("run.seed = -1\n", "toml", "run.toml:1: --seed -1"),
        ('{"seed": 1,\n "lr" 3}', "json", "run.json:2: it is not valid JSON"),
        ('{\n "seed": 1,\n "seed": 2}', "json", "run.json:3: seed: it stands on line 2 already"),
        ('{\n "run": {\n  "seed": "x"}}', "json", "run.json:3: --seed x"),
        ("[]", "json", "run.json:1:"),
        (f'{{"seed": {"1" * 5000}}}', "json", "run.json: it cannot be read (Exceeds the limit"),
        (f"seed = {'1' * 5000}\n", "toml", "run.toml: it cannot be read (Exceeds the limit"),
        (f"seed: {'1' * 5000}\n", "yaml", "run.yaml:1: --seed 111"),
        (f"{KWARGS}: '{{\"a\": {'1' * 5000}}}'", "yaml", f"run.yaml:1: --{KWARGS} "),
        ("run: &base\n  seed: 1\ntrain:\n  <<: *base\n", "yaml", "run.yaml:4: merge keys (<<) are not read"),
        ("apply-chat-template-kwargs: {a: [&b {c: 1}, {<<: *b}]}\n", "yaml", "run.yaml:1: merge keys"),
        (ALIASES, "yaml", "run.yaml:6: it has more than 20,000"),
    ],
)
def test_a_file_that_is_damaged(text: str, suffix: str, start: str, files: Files) -> None:
    (error,) = files.errors(text, suffix=suffix)
    assert error.startswith(start)


def test_a_file_that_is_not_there(files: Files) -> None:
    for path, start in (("/no/run.yaml", "No such"), (files.folder, "Is a dir")):
        with pytest.raises(CommandLineError, match=re.escape(f"--config {path}: it cannot be read ({start}")):
            read_args(["--config", str(path)])
    assert read_args(["--config"])[1] == ["--config: it needs a value"]
    path = str(files.write("lr: 1"))
    assert "only one file is read" in read_args(["--config", path, "--config", path])[1][0]


def test_the_template_loads_as_it_is(files: Files) -> None:
    text = render_template()
    assert files.read(text).given() == []
    shown = [line[1:] for line in text.splitlines() if line.startswith("#") and line[1:2].isalpha()]
    assert [line.partition(":")[0].replace("-", "_") for line in shown] == list(FIELDS)
    assert max(map(len, text.splitlines())) <= 120
    config = files.read("\n".join(shown))
    assert config == Config()


FLAGS = [
    *("--algorithm", "dapo", "--rollout-max-response-len", "100", "--eps-clip", "0.25", "--name", "first"),
    *("--prompt-data", "train.jsonl", "--no-offload-rollout", "--no-save", "--lr", "1e-7"),
    *("--rollout-sample-hook-path", "b.py:first", "a.py:second", "b.py:first", "--rollout-stop", "\u2028 :", "no"),
    *("--apply-chat-template-kwargs", '{"think": false, "text": "no", "d": {"lr": 1}}', "--attention-dropout", "0.25"),
    *("--no-apply-rope-fusion", "--router-log-level", "warn", "--run-dir-mode", "755"),
]


def former(files: Files, *argv: str) -> tuple[Config, Path]:
    config, errors = read_args([*FLAGS, *argv])
    assert errors == []
    with RunDir(files.folder / "run") as run_dir:
        return config, run_dir.write_config(config.model_dump())


def test_a_former_run_starts_again(files: Files) -> None:
    """Its config.json gives the same Config, and the same flags count as given."""
    own = files.folder / "own.yaml"
    own.write_text("judge: {url: http://judge, rate: 1.5}\nwords: [a, 1]\n")
    config, path = former(files, "--custom-config-path", str(own))
    own.write_text("judge: another\n")
    again, errors = read_args(["--config", str(path)])
    assert (again, again.given(), errors) == (config, config.given(), [])
    assert again.rollout.rollout_sample_hook_path == ["b.py:first", "a.py:second", "b.py:first"]
    assert again.to_args().judge == {"url": "http://judge", "rate": 1.5}, "as the former run had it"
    other, errors = read_args(["--config", str(path), "--custom-config-path", str(own)])
    assert errors == [] and other.to_args().judge == "another" and not hasattr(other.to_args(), "words")


def test_another_preset_over_a_former_run(files: Files) -> None:
    """A preset's values were the preset's choice: another one brings its own. What the user chose stays."""
    _, path = former(files)
    config, errors = read_args(["--config", str(path), "--algorithm", "gspo", "--attention-dropout", "0.5"])
    assert errors == []
    algorithm = config.algorithm
    assert (algorithm.advantage_estimator, algorithm.eps_clip, algorithm.eps_clip_high) == ("gspo", 0.25, 4e-4)
    assert config.rollout.dynamic_sampling_filter_path is None and config.reward.overlong_buffer_len is None
    assert config.passthrough.transformer == {"attention_dropout": 0.5, "apply_rope_fusion": False}


def test_the_file_of_a_resume_does_not_resume(files: Files) -> None:
    """With it and --run-dir B, a run in B would go on under other flags: a folder with a run needs --resume."""
    _, path = former(files, "--resume", "--dry-run", "--run-dir", str(files.folder / "run"))
    again, errors = read_args(["--config", str(path)])
    assert errors == [] and not again.run.resume and not again.run.dry_run
    assert "resume" not in again.given() and again.run.name == "first"
    assert read_args(["--config", str(path), "--resume"])[0].run.resume
    short, errors = read_args(["--resume", "--run-dir", str(files.folder / "run")])
    assert errors == [] and short.run.resume and short.run.name == "first", "the short form"
    assert files.read("resume: true").run.resume, "a file of one's own may"


def test_a_resume_continues_without_the_record_that_its_run_followed(files: Files) -> None:
    """A record begins with the run. With --config the run starts again, and follows it."""
    _, path = former(files, "--replay-schedule", "runs/first", "--run-dir", str(files.folder / "run"))
    short, errors = read_args(["--resume", "--run-dir", str(files.folder / "run")])
    assert errors == [] and short.run.name == "first" and short.pipelining.replay_schedule is None
    assert read_args(["--config", str(path)])[0].pipelining.replay_schedule == "runs/first"
    assert read_args(["--config", str(path), "--resume"])[0].pipelining.replay_schedule is None


SECRET = "http://me:***@host"
HIDDEN = {
    **{"rm_url": f"{SECRET}/x", "rollout_stop": ["a", "x://me:***@b"], OF_TEMPLATE: {"a": [{SECRET: 1}]}},
    "passthrough": {
        "sglang": {"file_storage_path": SECRET, "encoder_urls": [SECRET]},
        "router": {"redis_url": SECRET},
        "custom": {"judge": {"urls": [SECRET]}, "other": 1},
    },
}


def test_a_hidden_password_is_found_wherever_it_is(files: Files) -> None:
    found = files.errors(json.dumps(HIDDEN, indent=1), suffix="json")
    names = ("rm-url", "rollout-stop", KWARGS, "sglang-file-storage-path", "sglang-encoder-urls", "router-redis-url")
    for name in (*(f"--{name}" for name in names), "passthrough.custom.judge"):
        assert sum(f": {name}" in error and "the password is not kept" in error for error in found) == 1, (name, found)
    assert len(found) == 7 and any("give --custom-config-path" in error for error in found)
    (error,) = files.errors("sglang-file-storage-path: http://me:***@host")
    assert error.startswith("run.yaml:1: --sglang-file-storage-path http://me:***@host: the password is not kept")


def test_a_flag_on_the_command_line_gives_the_hidden_password(files: Files) -> None:
    own, address = files.folder / "own.yaml", "http://me:secret@host"
    own.write_text(f"judge: {address}\n")
    names = ("rm-url", "sglang-file-storage-path", "sglang-encoder-urls", "router-redis-url")
    argv = [f"--{name}={address}" for name in names]
    argv += ["--rollout-stop", "c", f"--{KWARGS}={{}}", "--custom-config-path", str(own)]
    config = files.read(json.dumps(HIDDEN), *argv, suffix="json")
    assert "***" not in config.model_dump_json()
    assert config.reward.rm_url == address and config.passthrough.custom == {"judge": address}
    assert config.passthrough.sglang == {"file_storage_path": address, "encoder_urls": [address]}
    assert config.passthrough.router == {"redis_url": address}


def test_mistakes_in_a_former_runs_file(files: Files) -> None:
    _, path = former(files, "--rm-url", "http://me:secret@host/x", "--rm-type", "remote_rm")
    raw = json.loads(path.read_text())
    raw["train"] |= {"lr": "fast", "learning_rat": 1}
    raw["passthrough"]["transformer"] |= {"attention_dropot": 1, "bf16": True}
    raw["passthrough"]["nothing"] = 1
    path.write_text(json.dumps(raw, indent=2))
    lines = path.read_text().splitlines()
    _, errors = read_args(["--config", str(path)])
    for key, text in (
        ("rm_url", "the password is not kept"),
        ("lr", "valid number"),
        ("learning_rat", "unknown flag"),
        ("attention_dropot", "did you mean attention_dropout?"),
        ("bf16", "use --precision"),
        ("nothing", "unknown key; known are custom, sglang"),
    ):
        line = next(i for i, line in enumerate(lines, 1) if f'"{key}":' in line)
        assert sum(error.startswith(f"{path}:{line}: ") and text in error for error in errors) == 1, (key, errors)
    assert len(errors) == 6
