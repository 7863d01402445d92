"""`fusionrl from-slime` and the shim, from the outside: a script in, a command out, which the plan takes."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from fusionrl.cli import main
from fusionrl.compat.slime.command import make_shim, run_launch
from fusionrl.config.parser import read_args
from fusionrl.config.pipeline import FULLY_ASYNC

SCRIPT = """\
set -ex
NUM_GPUS=${NUM_GPUS:-2}
HAS_NVLINK=$(nvidia-smi topo -m | grep -c NV)
source "$(dirname -- "${BASH_SOURCE[0]}")/models/tiny.sh"
CKPT_ARGS=(
   --hf-checkpoint "${MODEL:-/models/tiny}"
   #--hf-checkpoint /models/other
   --save /runs/tiny/
   --load /runs/tiny/
   --save-interval 20
)
ARGS=(
   --prompt-data "$DATA/train.jsonl"
   --rollout-batch-size 4 --num-rollout 2 --rollout-max-response-len 8
   --rm-type math
   --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta2 0.98
   --optimizer adam
   --attention-backend flash
   --use-wandb --wandb-key ${WANDB_KEY}
)
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json="{\\"env_vars\\": {\\"PYTHONPATH\\": \\"/x\\", \\"JUDGE\\": \\"${HAS_NVLINK}\\"}}" \\
   -- python3 train.py \\
   --actor-num-gpus-per-node ${NUM_GPUS} \\
   ${MODEL_ARGS[@]} "${CKPT_ARGS[@]}" \\
   ${ARGS[@]}
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text("MODEL_ARGS=(--swiglu --num-layers $((1 + 1)))\n")
    file = tmp_path / "run.sh"
    file.write_text(SCRIPT)
    return file


class Printed:
    """What `from-slime` printed: all of it, the comments as one text, and the command as one line."""

    def __init__(self, out: str) -> None:
        self.out = out
        lines = out.replace("\\\n", " ").splitlines()
        self.comment = " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
        (self.command,) = [line for line in lines if line.startswith("fusionrl train")]
        self.words = shlex.split(self.command)


@pytest.fixture
def translate(script: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Printed]:
    """translate(flags in place of --optimizer adam, flag of from-slime, …, program=…)."""

    def run(more: str = "--optimizer adam", *flags: str, program: str = "train") -> Printed:
        script.write_text(SCRIPT.replace("--optimizer adam", more).replace("train.py", f"{program}.py"))
        assert main(["from-slime", str(script), *flags]) == 0
        return Printed(capsys.readouterr().out)

    return run


def test_the_printed_command(translate: Callable[..., Printed]) -> None:
    printed = translate("--optimizer adam", "--set", "MODEL=/my model")
    for text in (
        *("--save /runs/tiny/: it is --run-dir /runs/tiny/", "it is --resume", "2 flags of the model's shape"),
        *("--attention-backend flash", "--optimizer adam", "fusionrl track RUN --to wandb", "--wandb-key: left out"),
        *("the job sets JUDGE", "slime's defaults, which are others here: --no-calculate-per-token-loss"),
        "${DATA} is left as the script has it",
    ):
        assert text in printed.comment, (text, printed.comment)
    assert "WANDB_KEY" not in printed.out and '"${DATA}/train.jsonl"' in printed.command
    assert printed.words[:2] == ["fusionrl", "train"] and "/my model" in printed.words
    config, errors = read_args(printed.words[2:])
    assert errors == [] and config.passthrough.slime == {}
    assert (config.run.run_dir, config.run.resume, config.train.weight_decay) == ("/runs/tiny/", True, 0.1)
    assert (config.data.tool_key, config.algorithm.calculate_per_token_loss) == ("tools", False)
    assert config.cluster.actor_num_gpus_per_node == 2


def test_a_flag_that_is_not_here_is_in_the_comments(translate: Callable[..., Printed]) -> None:
    printed = translate("--optimizer sgd --rollout-batch-sizes 4")
    assert "TO CHANGE" not in printed.out and "--optimizer" not in printed.command
    assert "NOT HERE --optimizer sgd: the optimizer is Adam" in printed.comment
    assert "--rollout-batch-sizes (--rollout-batch-size?):" in printed.comment, "a mistake, or a flag of a fork"


def test_a_function_beside_the_script_is_named_by_its_file(translate: Callable[..., Printed], script: Path) -> None:
    """slime's scripts have their own folder on PYTHONPATH."""
    (script.parent / "search.py").write_text("async def generate(args, sample, params): ...\n")
    printed = translate("--custom-generate-function-path search.generate --custom-rm-path elsewhere.rm")
    assert f"--custom-generate-function-path {script.parent}/search.py:generate " in printed.command
    assert "--custom-rm-path elsewhere.rm " in printed.command
    assert "search.generate is next to the script" in printed.comment


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        (
            "--judge-url http://x:1 --prm-enable --prm-m 3 --coef 1e-6 --judges a b:#c 2 --no-cache false --mode_=x"
            " --id 007",
            {"judge_url": "http://x:1", "prm_enable": True, "prm_m": 3, "coef": 1e-6, "judges": ["a", "b:#c", 2]}
            | {"no_cache": False, "mode_": "x", "id": "007"},
        ),
        ("--judge-url http://$HOST:1 --judge-n $N --judge-key 'a$b\\c\"'", None),
        ("--custom-config-path $D/mine.yaml --judge-n 1", {"judge_n": 2, "mine": 1}),
    ],
)
def test_flags_of_a_fork_are_in_the_file_of_custom_config_path(
    translate: Callable[..., Printed], script: Path, more: str, wanted: dict[str, object] | None
) -> None:
    """The printed script writes that file, and functions find the flags in their `args`, as in slime."""
    (script.parent / "mine.yaml").write_text("judge_n: 2\nmine: 1")
    printed = translate(more)
    assert "They are in run.args.yaml" in printed.comment
    assert "TO CHANGE" not in printed.comment and "NOT HERE" not in printed.comment
    fake = script.parent / "fusionrl"
    fake.write_text("#!/bin/bash\nprintf '%s\\n' \"$@\" > argv\n")
    fake.chmod(0o755)
    folder = str(script.parent)
    variables = {"PATH": f"{folder}:/usr/bin:/bin", "HOST": "h", "N": "4", "D": folder}
    subprocess.run(["bash", "-eu", "-c", "DATA=/d NUM_GPUS=1;" + printed.out], cwd=folder, env=variables, check=True)
    argv = (script.parent / "argv").read_text().splitlines()
    words = [argv[0], "--custom-config-path", folder + "/" + argv[argv.index("--custom-config-path") + 1]]
    assert argv.count("--custom-config-path") == 1
    config, errors = read_args(words[1:])
    assert errors == []
    assert config.passthrough.custom == (wanted or {"judge_url": "http://h:1", "judge_n": 4, "judge_key": 'a$b\\c"'})


def test_variables_of_the_trainers_are_exported(translate: Callable[..., Printed]) -> None:
    """slime sets them in the trainers' processes; here trainers get the environment of the command."""
    printed = translate("""--train-env-vars '{"A":"x","N":1}'""")
    assert "\nexport A=x\nexport N=1\nfusionrl train" in printed.out and "--train-env-vars" not in printed.out


def test_files_that_a_launch_writes_are_written_by_the_printed_script(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan is not asked for files that are not there yet."""
    text, launcher = "eval:\n  note: 'costs $5'\n", script.with_suffix(".py")
    launcher.write_text(
        f"import slime.utils.external_utils.command_utils as U\ntext = {text!r} + f'  n: {{2 + 2}}\\n'\n"
        "U.execute_train(f\"--custom-config-path {U.save_to_temp_file(text, 'yaml')}\", 8, None)\n"
    )
    written = "cat > $PWD/mine.yaml <<EOF\n" + text.replace("$5", "\\$5") + "  n: $((2 + 2))\nEOF\n"
    script.write_text(f"{written}python train.py --custom-config-path $PWD/mine.yaml\n")
    for file, name in ((script, "mine.yaml"), (launcher, "run.1.yaml")):
        assert main(["from-slime", str(file)]) == 0
        printed = capsys.readouterr().out
        assert "cannot be read" not in printed
        subprocess.run(["bash", "-eu", "-c", f"fusionrl() {{ :; }}; {printed}"], cwd=script.parent, check=True)
        assert (script.parent / name).read_text() == text + "  n: 4\n"


@pytest.mark.parametrize(
    ("more", "last"),
    [
        ('--lr 1e-6 "$@" --sglang-enable-metrics $(flags)', '"$@" $(flags)'),
        ("--colocate $EXTRA --eval-prompt-data aime $EVAL --seed 1 ${MORE} $LAST", "${EXTRA} ${MORE} ${LAST}"),
    ],
)
def test_words_that_may_be_flags_stand_last(translate: Callable[..., Printed], more: str, last: str) -> None:
    """They are no values of the flag before them, and one that is empty is no argument."""
    printed = translate(more)
    assert " ".join(printed.command.split()).endswith(f" 1 {last}") and "TO CHANGE" not in printed.out
    assert all(f"{part.strip(chr(34))} is left as the script has it" in printed.comment for part in last.split())


def test_what_keeps_it_from_running_as_it_stands(translate: Callable[..., Printed]) -> None:
    printed = translate("--rollout-num-gpus-per-engine 16 --max-tokens-per-gpu 8 --seed ${SEED} --lr fast")
    changes = [line.split()[3] for line in printed.out.splitlines() if line.startswith("# TO CHANGE")]
    assert changes == ["--lr", "--max-tokens-per-gpu"]


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["no.sh"], "no.sh: it cannot be read"),
        (["--set", "X"], "--set: X: NAME=VALUE"),
        (["a.sh", "b.sh"], "b.sh"),
        (["--flag"], "--flag"),
        (["--shim"], "--shim"),
        ([], "SCRIPT"),
    ],
)
def test_mistakes(argv: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["from-slime", *argv]) == 2
    assert part in "".join(capsys.readouterr())


def test_a_small_command_has_nothing_of_the_cluster(translate: Callable[..., Printed]) -> None:
    """Two steps on a machine without a GPU: no parallel ranks, no CUDA kernels, no evaluation; the rest as it was."""
    printed = translate(
        "--tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8 --moe-grouped-gemm"
        " --optimizer-cpu-offload --use-precision-aware-optimizer --eval-interval 5 --eval-prompt-data aime a.jsonl"
        " --sglang-cuda-graph-bs 1 2 4 --eval-top-p 1 --num-epoch 3 --entropy-coef 0.01",
        "--small",
    )
    assert "it is --resume" not in printed.out, "it has none"
    assert "Give --hf-checkpoint, --prompt-data, --run-dir a small model of the same family" in printed.comment
    gone = ("parallel-size", "moe", "offload", "precision", "eval", "cuda-graph", "--num-epoch", "--resume", "2 4")
    assert not [part for part in gone if part in printed.command]
    for flag, value in {"--num-rollout": "2", "--global-batch-size": "4", "--entropy-coef": "0.01"}.items():
        assert [after for word, after in pairwise(printed.words) if word == flag] == [value]
    assert printed.words.count("--actor-num-gpus-per-node") == 1 and "TO CHANGE" not in printed.command


@pytest.mark.parametrize(
    ("program", "more", "is_ahead", "comment"),
    [
        ("train_async", "", True, "slime's defaults, which are others here: "),
        ("train_async", "--use-tis", True, ""),
        (
            "train_async",
            "--partial-rollout --over-sampling-batch-size 8",
            False,
            "one rollout ahead (--pipeline one-step-off); this one generates and trains in turn: ",
        ),
        ("train_async", f"--rollout-function-path {FULLY_ASYNC[0]}", False, ""),
    ],
)
def test_train_async_generates_one_rollout_ahead_and_corrects_no_more_than_slime_does(
    translate: Callable[..., Printed], program: str, more: str, is_ahead: bool, comment: str
) -> None:
    """--pipeline one-step-off has --use-tis on by default; slime trains without it unless a script gives it."""
    printed = translate(more, program=program)
    assert ("--pipeline one-step-off" in printed.command) is is_ahead and comment in printed.comment
    assert ("--no-use-tis" in printed.words) is (is_ahead and not more)
    assert read_args(printed.words[2:])[0].algorithm.use_tis is (more == "--use-tis")


def test_the_shim_takes_slimes_arguments(tmp_path: Path) -> None:
    """`python train.py …` is `fusionrl train …`: here up to the checks, which name what is wrong."""
    train, other = make_shim(str(tmp_path))
    assert [train.name, other.name] == ["train.py", "train_async.py"] and make_shim(str(tmp_path)) == [train, other]
    argv = ["--swiglu", "--save", str(tmp_path / "run"), "--hf-checkpoint", str(tmp_path / "no"), "--fp16"]
    done = subprocess.run([sys.executable, str(other), *argv], capture_output=True, text=True)
    assert done.returncode == 2 and "--fp16:" in done.stderr and "there is no such folder" in done.stderr
    assert "slime's defaults: --no-calculate-per-token-loss" in done.stderr
    train.write_text("mine\n")
    with pytest.raises(ValueError, match="is there already"):
        make_shim(str(tmp_path))


def test_a_run_by_the_shim_corrects_no_more_than_slime_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusionrl.cli.train.run", lambda argv: commands.append(list(argv)) or 0)
    commands: list[list[str]] = []
    for program, more in (("train_async", []), ("train_async", ["--use-tis"]), ("train", [])):
        assert run_launch(["--lr", "1e-6", *more], program) == 0
    assert ["--no-use-tis" in argv for argv in commands] == [True, False, False]
    assert ["one-step-off" in argv for argv in commands] == [True, True, False]


@pytest.fixture
def launch(tiny_model: Path, write_rows: Callable[..., Path], tmp_path: Path) -> list[str]:
    """The arguments of a launch script of slime's, for a model that is there."""
    data = write_rows([{"input": f"{i}+1=", "label": str(i + 1)} for i in range(10)])
    shape = json.loads((tiny_model / "config.json").read_text())
    return [
        *("--num-layers", str(shape["num_hidden_layers"]), "--hidden-size", str(shape["hidden_size"]), "--swiglu"),
        *("--vocab-size", str(shape["vocab_size"]), "--qk-layernorm", "--disable-bias-linear"),
        *("--hf-checkpoint", str(tiny_model), "--ref-load", str(tiny_model), "--use-kl-loss"),
        *("--save", str(tmp_path / "run"), "--load", str(tmp_path / "run")),
        *("--prompt-data", str(data), "--label-key", "label", "--rm-type", "math", "--num-rollout", "2"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "4"),
        *("--lr", "1e-6", "--lr-decay-style", "linear", "--lr-warmup-fraction", "0.5", "--optimizer", "adam"),
        *("--attention-backend", "flash", "--accumulate-allreduce-grads-in-fp32", "--data-pad-size-multiplier", "4096"),
        *("--no-check-for-nan-in-loss-and-grad", "--use-wandb", "--wandb-project", "p", "--device", "cpu"),
    ]


def test_the_plan_says_what_became_of_a_launch(
    launch: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *launch]) == 0
    out, err = capsys.readouterr()
    assert f"slime's flags: --save {tmp_path}/run: it is --run-dir {tmp_path}/run" in err
    for text in (
        *("no effect: `fusionrl track RUN --to wandb", "--use-wandb, --wandb-project p"),
        "--data-pad-size-multiplier 4096",
        *("--max-skipped-steps", "learning rate 0 at optimizer step 1"),
    ):
        assert text in out, text
    assert "--num-layers" not in out + err and "--swiglu" not in out + err, "what is equal is accepted in silence"


def test_a_shape_that_differs_is_an_error_with_both_values(
    launch: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shape = dict(pairwise(launch))
    assert main(["plan", *launch, "--num-layers", "36", "--add-qkv-bias"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 2
    assert f"--num-layers 36: the config.json of --hf-checkpoint {shape['--hf-checkpoint']} has" in lines[0]
    assert f"has {shape['--num-layers']};" in lines[0] and "--add-qkv-bias: " in lines[1]
