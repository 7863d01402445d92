"""Files of flags: `--sglang-config` and `--megatron-config-path` become the flags that do the same."""

from pathlib import Path

import pytest

from fusionrl.compat.slime.arguments import left, set_apart, with_flags
from fusionrl.compat.slime.script import read_script
from fusionrl.compat.slime.translate import translate
from fusionrl.config.engine_groups import read_groups
from fusionrl.config.parser import read_args

PAIR = """\
sglang:
  - name: default
    num_gpus_per_engine: 4
    server_groups:
      - {worker_type: prefill, num_gpus: 4, overrides: {ib_device: "a,b", dp_size: 4, hybrid: true}}
      - {worker_type: decode, num_gpus: 8, num_gpus_per_engine: 2, overrides: {ib_device: "a,b", hybrid: false, n: 3}}
"""
SIZES = """\
sglang:
  - name: default
    server_groups:
      - {worker_type: regular, num_gpus: 4, num_gpus_per_engine: 2}
      - {worker_type: placeholder, num_gpus: 2}
      - {worker_type: regular, num_gpus: 2}
"""
CRITIC = """\
megatron:
  - {name: default, role: critic, overrides: {lr: 1e-5, lr_warmup_iters: 3}}
  - {name: default, role: actor, overrides: {lr: 1e-7}}
"""


def flags_of(flag: str, text: str, before: str = "") -> tuple[list[str], list[str]]:
    """The arguments of a launch with a file of that text, and the notes."""
    notes: list[str] = []
    argv = ["--hf-checkpoint", "/m", *before.split(), flag, "conf.yaml", "--seed", "1"]
    return with_flags(argv, {"conf.yaml": text}.get, notes.append)[0], notes


@pytest.mark.parametrize(
    ("flag", "text", "before", "wanted"),
    [
        (*("--sglang-config", SIZES, ""), "--engine-group regular-1:num_gpus=4,per_engine=2 regular-2:num_gpus=2"),
        (
            *("--sglang-config", PAIR, "--sglang-ib-device c"),
            "--sglang-ib-device a,b --engine-group prefill-1:num_gpus=4,per_engine=4,role=prefill,hybrid=true"
            " decode-2:num_gpus=8,per_engine=2,role=decode,hybrid=false,n=3",
        ),
        ("--megatron-config-path", CRITIC, "--lr 1e-6", "--critic-lr 1e-5 --critic-lr-warmup-iters 3 --lr 1e-7"),
    ],
)
def test_a_file_becomes_flags(flag: str, text: str, before: str, wanted: str) -> None:
    argv, notes = flags_of(flag, text, before)
    assert argv == ["--hf-checkpoint", "/m", "--seed", "1", *wanted.split()]
    assert notes == [f"{flag} conf.yaml: it is {wanted}"]


def test_the_flags_are_read_as_they_are_meant() -> None:
    *_, first, second = flags_of("--sglang-config", SIZES)[0]
    assert [(one.num_engines, one.per_engine) for one in read_groups((first, second), 1)] == [(2, 2), (2, 1)]
    config, errors = read_args(flags_of("--megatron-config-path", CRITIC)[0])
    assert not errors and (config.train.lr, config.critic.critic_lr) == (1e-7, 1e-5)


@pytest.mark.parametrize(
    ("flag", "text", "reason"),
    [
        ("--sglang-config", "sglang: [{name: a, server_groups: []}, {name: b}]", "it serves 2 models"),
        ("--sglang-config", "sglang: [{name: a, model_path: /other, server_groups: []}]", "its model has model_path"),
        ("--sglang-config", "sglang: [{name: a, update_weights: false}]", "update_weights is false"),
        ("--sglang-config", "sglang: [{server_groups: [{worker_type: encoder, num_gpus: 1}]}]", "worker_type encoder"),
        ("--sglang-config", "sglang: [{server_groups: [{worker_type: placeholder, num_gpus: 1}]}]", "no engines"),
        ("--sglang-config", "a: [", "it is not YAML"),
        ("--sglang-config", "prefill: 1", "expected a list of mappings under `sglang`"),
        ("--megatron-config-path", "megatron: [{role: ref, overrides: {lr: 1}}]", "role ref"),
        ("--megatron-config-path", "megatron: [{role: critic, overrides: {optimizer: sgd}}]", "no --critic-optimizer"),
    ],
)
def test_what_no_flag_says_is_refused_with_the_reason(flag: str, text: str, reason: str) -> None:
    argv, notes = flags_of(flag, text)
    assert reason in notes[0] and argv[2:4] == [flag, "conf.yaml"]
    assert any(flag in error for error in translate(argv).errors)


def test_files_that_a_script_or_a_launcher_writes(tmp_path: Path) -> None:
    shell = f'F=$(mktemp /tmp/x_XXX.yaml)\ncat > "$F" <<CFG\n{CRITIC}CFG\npython train.py --megatron-config-path "$F"\n'
    temporary = "f = tempfile.NamedTemporaryFile('w', suffix='.yaml', delete=False)\n"
    start = f"import slime.utils.external_utils.command_utils as U\nimport tempfile, yaml\ntext = '''{CRITIC}'''\n"
    end = "U.execute_train(f'--megatron-config-path {f.name}', 8, None)\n"
    loaded = "{'megatron': [{'role': 'critic', 'overrides': {'lr': '1e-5', 'lr_warmup_iters': 3}}]}"
    for name, text in {
        "run.sh": shell,
        "a.py": f"{start}{temporary}f.write(text)\n{end}",
        "b.py": f"{start}with tempfile.NamedTemporaryFile('w') as f:\n    f.write(yaml.safe_dump({loaded}))\n{end}",
        "c.py": f"{start}{temporary}with f:\n    yaml.dump({loaded}, f, sort_keys=False)\n{end}",
    }.items():
        (tmp_path / name).write_text(text)
        script = read_script(tmp_path / name)
        assert script.launches[0].argv[:4] == ("--critic-lr", "1e-5", "--critic-lr-warmup-iters", "3"), name
        assert not script.files, "no flag reads the file any more"


def test_a_launch_of_which_no_flag_is_known_is_an_error() -> None:
    for words, count in (([left("${ALL}")], 1), ([left("$@")], 0), ([left("${ALL}"), "--seed", "1"], 0), ([], 0)):
        assert len(set_apart(words).errors) == count, words
