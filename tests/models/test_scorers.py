"""A reward model and a teacher: what their folders say, and which mistakes are found before anything starts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionrl.checks.validate import validate
from fusionrl.config.config import Config
from fusionrl.models.engine_config import ScorerModel, read_scorer, same_tokens
from tests.tiny_model import make_classifier, make_tiny_qwen3
from tests.trainer import hf_models

Errors = Callable[..., list[str]]
DISTILLATION = "slime.rollout.on_policy_distillation"


@pytest.fixture(scope="module")
def rm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier(tiny_model, tmp_path_factory.mktemp("rm") / "model")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of fewer tokens with the same tokenizer."""
    return make_tiny_qwen3(tmp_path_factory.mktemp("small") / "model", vocab_size=300)


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """changed(folder, **config) -> a copy with other values in its config.json; a value of None takes one away."""

    def make(folder: Path, **config: Any) -> Path:
        path = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
        shutil.copytree(folder, path)
        values = json.loads((path / "config.json").read_text()) | config
        (path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
        return path

    return make


@pytest.fixture
def other_tokens(changed: Callable[..., Path]) -> Callable[[Path], Path]:
    """A copy whose tokenizer has two tokens in each other's place."""

    def make(folder: Path) -> Path:
        path = changed(folder)
        tokenizer = json.loads((path / "tokenizer.json").read_text())
        vocab = tokenizer["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))
        return path

    return make


@pytest.fixture
def errors(tiny_model: Path, write_rows: Callable[..., Path]) -> Errors:
    """errors(field=value, …) -> messages about an otherwise good rl run; a value of None takes the flag away."""
    base = {
        "hf_checkpoint": str(tiny_model),
        "prompt_data": str(write_rows([{"input": "1+1=", "label": "2"}])),
        "label_key": "label",
        "rm_type": "exact",
        "rollout_batch_size": 1,
        "rollout_max_response_len": 4,
        "num_rollout": 1,
        "device": "cpu",
    }

    def find(**changes: Any) -> list[str]:
        values = {name: value for name, value in (base | changes).items() if value is not None}
        return validate(Config.from_flat({k: str(v) if isinstance(v, Path) else v for k, v in values.items()}))[1]

    return find


def one(found: list[str], *parts: str) -> None:
    assert len(found) == 1, found
    assert all(part in found[0] for part in parts), found


def test_what_a_folder_says(rm: Path, changed: Callable[..., Path]) -> None:
    expected = ScorerModel("Qwen3ForSequenceClassification", 1, 512, 4, 2048, 256)
    assert read_scorer(str(rm), "--rm-model") == expected
    scaled = changed(rm, rope_parameters={"rope_type": "yarn", "factor": 4.0})
    assert read_scorer(str(scaled), "--rm-model").max_positions is None
    assert read_scorer(str(changed(rm, id2label=None)), "--rm-model").num_labels == 2  # transformers' own default
    code = changed(rm, id2label=None, architectures=["Qwen2ForRewardModel"])
    assert read_scorer(str(code), "--rm-model").num_labels == 1
    with pytest.raises(ValueError, match=r"--rm-model .*: config.json lacks or garbles a size .*vocab_size"):
        read_scorer(str(changed(rm, vocab_size=None)), "--rm-model")


@pytest.mark.parametrize("family", hf_models.SPARSE)
def test_a_teacher_with_sparse_attention_reads_as_much_as_its_engine(family: str, tmp_path: Path) -> None:
    sizes = hf_models.COMMON | hf_models.SPARSE[family] | {"model_type": family}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert read_scorer(str(tmp_path), "--opd-teacher-load").max_positions == sizes["index_topk"] == 64


def test_tokenizers_are_compared_by_their_tokens(
    tiny_model: Path, rm: Path, small: Path, other_tokens: Callable[[Path], Path], changed: Callable[..., Path]
) -> None:
    assert same_tokens(str(tiny_model), str(rm))
    assert same_tokens(str(tiny_model), str(small))
    assert not same_tokens(str(tiny_model), str(other_tokens(tiny_model)))
    bare = changed(tiny_model)
    (bare / "tokenizer.json").unlink()
    assert not same_tokens(str(tiny_model), str(bare))


def test_good_configurations(errors: Errors, rm: Path, tiny_model: Path, other_tokens: Callable[[Path], Path]) -> None:
    assert errors(rm_type="reward_model", rm_model=rm) == []
    assert errors(rm_type="reward_model:0.5+exact:0.5", rm_model=rm, rm_num_gpus=2, rm_num_gpus_per_engine=2) == []
    assert errors(rm_type="reward_model", rm_model=other_tokens(rm)) == []  # written anew by its own template
    assert errors(rm_model=rm, rm_server_args={"mem_fraction_static": 0.5, "trust_remote_code": True}) == []
    teacher = {"use_opd": True, "opd_teacher_load": str(tiny_model)}
    assert errors(**teacher) == []
    assert errors(**teacher, rm_type=None) == []
    of_mine = {"use_opd": True, "custom_reward_post_process_path": f"{DISTILLATION}.post_process_rewards"}
    assert errors(**of_mine) == []  # which asks a teacher of the user's
    one(errors(**of_mine, opd_type="megatron"), "--use-opd needs --opd-teacher-load")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"rm_type": "reward_model"}, ["--rm-type reward_model needs --rm-model"]),
        ({"rm_type": "exact+reward_model:0.5"}, ["--rm-type exact+reward_model:0.5 needs --rm-model"]),
        ({"rm_num_gpus": 2}, ["--rm-num-gpus 2 has no effect without --rm-model"]),
        ({"rm_model": "/nowhere"}, ["--rm-model /nowhere: there is no such folder"]),
        ({"opd_kl_coef": 0.5}, ["--opd-kl-coef 0.5 has no effect without --use-opd"]),
        ({"prm_beta": 0.1}, ["--prm-beta 0.1 has no effect without --advantage-estimator prime"]),
        (
            {"advantage_estimator": "prime", "policy_loss": "dpo", "n_samples_per_prompt": 2},
            ["--advantage-estimator prime: --policy-loss dpo has no use for it"],
        ),
        ({"use_opd": True}, ["--use-opd needs --opd-teacher-load"]),
        ({"use_opd": True, "opd_teacher_load": "/nowhere"}, ["--opd-teacher-load /nowhere: there is no such folder"]),
    ],
)
def test_flags_that_do_not_go_together(errors: Errors, changes: dict[str, Any], parts: list[str]) -> None:
    one(errors(**changes), *parts)


def test_models_that_are_no_reward_models(
    errors: Errors, rm: Path, tiny_model: Path, changed: Callable[..., Path]
) -> None:
    one(errors(rm_model=tiny_model), "it is a Qwen3ForCausalLM; a reward model is one of", "Qwen2ForRewardModel")
    one(errors(rm_model=changed(rm, id2label={"0": "a", "1": "b"})), "it has 2 labels; a reward model has one")
    cut = changed(rm)
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-9])
    one(errors(rm_model=cut), "--rm-model", "cut off or damaged")
    one(errors(rm_model=rm, rm_num_gpus_per_engine=3), "--rm-num-gpus-per-engine 3 does not divide", "4 attention")
    one(errors(rm_model=rm, rm_num_gpus_per_engine=4, num_gpus_per_node=3), "an engine over several nodes")
    short = changed(rm, max_position_embeddings=100)
    one(errors(rm_model=short, rollout_max_context_len=200), "--rollout-max-context-len 200 is over the 100 positions")
    one(errors(rm_model=rm, rm_server_args={"dtype": "half"}), "--rm-server-args dtype", "set by fusionrl")
    one(errors(rm_model=rm, rm_server_args={"mem_frac": 1}), "--rm-server-args mem_frac")


def test_tokens_that_the_reward_model_reads_otherwise(
    errors: Errors, rm: Path, other_tokens: Callable[[Path], Path]
) -> None:
    other = other_tokens(rm)
    one(errors(rm_model=other, rm_input="tokens"), "--rm-input tokens", "differ; use chat or auto")
    (other / "chat_template.jinja").unlink()
    one(errors(rm_model=other), f"--rm-model {other}: its tokenizer has no chat template")


def test_a_teacher_that_does_not_fit(
    errors: Errors,
    tiny_model: Path,
    small: Path,
    other_tokens: Callable[[Path], Path],
    write_rows: Any,
    tmp_path: Path,
) -> None:
    def opd(**changes: Any) -> list[str]:
        return errors(**{"use_opd": True, "opd_teacher_load": tiny_model} | changes)

    one(opd(opd_teacher_load=small), "vocabulary has 300 tokens", "has 512; it reads the policy's own tokens")
    one(opd(opd_teacher_load=other_tokens(tiny_model)), "its tokenizer has other tokens than that of --hf-checkpoint")
    one(opd(rollout_temperature=0.7), "--rollout-temperature 0.7", "at temperature 1")
    assert opd(opd_type="megatron", rollout_temperature=0.7) == []
    deeper = make_tiny_qwen3(tmp_path / "deeper", num_layers=3)
    one(opd(opd_type="megatron", opd_teacher_load=deeper), "its shape differs from that of --hf-checkpoint")
    one(opd(mode="reject-sampling"), "--use-opd has no effect in --mode reject-sampling")
    one(opd(opd_teacher_num_gpus_per_engine=3), "--opd-teacher-num-gpus-per-engine 3 does not divide")
    data = str(write_rows([{"input": "1+1=", "label": "2"}], "eval.jsonl"))
    one(opd(rm_type=None, eval_prompt_data=["a", data]), "an evaluation needs a reward")
    nonzero = "fusionrl.rollout.filters.check_reward_nonzero_std"
    one(
        opd(rm_type=None, dynamic_sampling_filter_path=nonzero),
        "check_reward_nonzero_std drops every group",
        "--use-opd",
    )


def test_a_process_reward_model_that_does_not_fit(
    errors: Errors, tiny_model: Path, small: Path, other_tokens: Callable[[Path], Path], changed: Callable[..., Path]
) -> None:
    def prm(folder: Path | str, **changes: Any) -> list[str]:
        return errors(advantage_estimator="prime", prm_load=folder, **changes)

    assert prm(tiny_model) == []
    one(prm("/nowhere"), "--prm-load /nowhere: there is no such folder")
    one(prm(small), f"--prm-load {small}: its vocabulary has 300 tokens", "has 512; it reads the policy's own tokens")
    one(prm(other_tokens(tiny_model)), "its tokenizer has other tokens than that of --hf-checkpoint")
    short = changed(tiny_model, max_position_embeddings=100)
    one(prm(short, rollout_max_context_len=200), "is over the 100 positions of --prm-load")
    teacher = {"use_opd": True, "opd_teacher_load": tiny_model}
    one(prm(tiny_model, **teacher, rm_type=None), "a reward is required in --mode rl")
