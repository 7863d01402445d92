"""Launchers in Python run in the sandbox: parameters, helpers of the checkout, `execute_train`, what is not known."""

import textwrap
from pathlib import Path

import pytest

from fusionrl.compat.slime.arguments import plain
from fusionrl.compat.slime.script import Script, read_script

SLIME = "import slime.utils.external_utils.command_utils as U\n"
DATACLASS = """\
from dataclasses import dataclass, field
from typing import Literal
import typer
import miles.utils.external_utils.command_utils as U

@dataclass
class Args(U.ExecuteTrainConfig):
    size: Literal["4B", "8B"] = "4B"
    nodes: int = 1
    quick: bool = False
    extra: str = ""
    stops: list[int] = field(default_factory=lambda: [1, 2])

def parallel(args):
    if args.nodes > 2:
        raise NotImplementedError(f"no layout for {args.nodes} nodes")
    return f"--tensor-model-parallel-size {args.nodes * 2} "

def execute(args: Args):
    text = f"--hf-checkpoint /m/{args.size} --num-rollout {2 if args.quick else 3000} " + parallel(args)
    text += " ".join(f"--stop{n}" for n in args.stops if n > 1)
    U.execute_train(train_args=text + f" {args.extra}", config=args, num_gpus_per_node=8, megatron_model_type=None)

@U.dataclass_cli
def main(args: Args):
    U.hf_download_dataset("x/y")
    open("/none")
    assert args.nodes == 7, "passed over, as the call before"
    execute(args)

if __name__ == "__main__":
    typer.run(main)
"""


def read(folder: Path, text: str, **values: str) -> Script:
    file = folder / "launch.py"
    file.write_text(text)
    return read_script(file, values)


def argv(folder: Path, text: str, **values: str) -> list[str]:
    """The arguments of the launcher's one run."""
    (launch,) = read(folder, text, **values).launches
    return [plain(word) for word in launch.argv]


def executed(body: str) -> str:
    return f"{SLIME}{body}\nU.execute_train(train_args=args, num_gpus_per_node=8, megatron_model_type=None)\n"


def test_parameters_have_their_defaults_and_the_values_of_set(tmp_path: Path) -> None:
    wanted = "--hf-checkpoint /m/4B --num-rollout 3000 --tensor-model-parallel-size 2 --stop2"
    assert argv(tmp_path, DATACLASS) == wanted.split()
    wanted = "--hf-checkpoint /m/8B --num-rollout 2 --tensor-model-parallel-size 4 --stop2 --seed 1"
    assert argv(tmp_path, DATACLASS, size="8B", nodes="2", extra="--seed 1", quick="true") == wanted.split()


def test_a_launcher_that_raises_is_refused_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no train_async.py; .*raises NotImplementedError.*no layout for"):
        read(tmp_path, DATACLASS, nodes="9")
    with pytest.raises(ValueError, match="launch.py: it is not Python"):
        read(tmp_path, "def f(:\n")
    with pytest.raises(ValueError, match="launch.py: it cannot be read"):
        read(tmp_path, "-" * 100_000 + "1\n")


@pytest.mark.parametrize("start", ["", "if __name__ == '__main__':\n    app()\n"])
def test_without_a_call_each_function_that_starts_a_run_is_read(tmp_path: Path, start: str) -> None:
    """Tests of pytest, and commands of a typer app."""
    text = SLIME + textwrap.dedent("""
        import typer
        app = typer.Typer()
        def execute(n):
            U.execute_train(f"--n {n}", 8, None, train_script="train_async.py")
        @app.command()
        def train(n: int = typer.Option(3, help="x")):
            execute(n)
        @app.command()
        def both(m: str = "5"):
            execute(m)
        @app.command()
        def prepare():
            U.exec_command("hf download x")
    """)
    launches = read(tmp_path, text + start).launches
    assert [(one.program, one.argv) for one in launches] == [
        ("train_async", ("--n", "3")),
        ("train_async", ("--n", "5")),
    ]


def test_what_only_the_machine_knows_is_a_variable_of_the_command(tmp_path: Path) -> None:
    text = executed(
        "import os, torch\nfrom wandb.util import make_id\nargs = f\"--save /r/{make_id('F')} --k {os.environ['K']}\"\n"
        "args += ' --b' if torch.cuda.is_available() or torch.__version__ > '2' else os.environ.get('B', ' --c')"
    )
    script = read(tmp_path, text)
    words = [plain(word) for word in script.launches[0].argv]
    assert words == ["--save", "/r/${wandb_util_make_id_F}", "--k", "${K}", "--c"]
    assert "`torch_cuda_is_available` (line 5) is taken as false: it is not known" in script.notes
    assert argv(tmp_path, text, K="3", B=" --d")[3:] == ["3", "--d"]


def test_the_flags_of_the_model_and_the_helpers_of_the_checkout(tmp_path: Path) -> None:
    """A shell's file as slime has it, a function of Python as miles has it, and modules beside the launcher."""
    utils = "def load_sibling_model_args(file, name, **given): return importlib.import_module(name).model_args(**given)"
    files = {
        "scripts/models/small.sh": "MODEL_ARGS=(--num-layers $((1 + 1)))\n",
        "scripts/models/large.py": "from model_args_utils import load_sibling_model_args\ndef model_args():\n"
        "    return load_sibling_model_args(__file__, 'common.base', base=20) + ' --moe '\n",
        "common/base.py": "def model_args(base): return f'--swiglu  --rotary-base {base}'\n",
        "common/parts.py": "import torch, none\n1 / 0\nWIDTH = 8\ndef more(n): return f'--n {n} --w {WIDTH} '\n",
        "miles/utils/external_utils/model_args_utils.py": f"import importlib, sys\n{utils}\n"
        "if __name__ == '__main__': print(load_sibling_model_args('', sys.argv[1], base=30))\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    folder = tmp_path / "examples"
    folder.mkdir()
    body = f"{SLIME}from common.parts import more\nimport common.parts as p\n"
    body += "U.execute_train(more(1) + f'--v {p.WIDTH}', 8, 'KIND', extra_env_vars={'JUDGE': 'x'})\n"
    shape = {"small": ("--num-layers", "2"), "large": ("--swiglu", "--rotary-base", "20", "--moe"), "none": ()}
    for kind, words in shape.items():
        script = read(folder, body.replace("KIND", kind))
        assert script.launches[0].argv == (*words, "--n", "1", "--w", "8", "--v", "8")
        assert script.launches[0].env == '{"env_vars": {"JUDGE": "x"}}'
    assert "scripts/models has no none" in script.notes[0]
    (folder / "run.sh").write_text(
        'LINE="$(python3 "$PWD/../miles/utils/external_utils/model_args_utils.py" common.base)" || exit 1\n'
        'read -ra A <<< "$LINE"\npython3 train.py "${A[@]}"\n'
    )
    assert read_script(folder / "run.sh").launches[0].argv == ("--swiglu", "--rotary-base", "30")


def test_commands_that_start_a_run(tmp_path: Path) -> None:
    calls = """
import os, subprocess
n = 3
os.system(f'cd /x && python train.py --n {n}')
subprocess.run(['python', 'train.py', '--n', str(n)], check=True)
subprocess.Popen(f'python train.py --n {n}', shell=True).wait()
U.exec_command(f'ray job submit -- python3 train.py --n {n}')
"""
    assert [launch.argv for launch in read(tmp_path, SLIME + calls).launches] == [("--n", "3")] * 4


def test_a_launcher_touches_nothing_and_waits_for_nothing(tmp_path: Path) -> None:
    body = f"""
import os, pathlib, time
os.system('touch made')
pathlib.Path({str(tmp_path)!r}, 'made').write_text('x')
args = '--a'
while True: time.sleep(9)
"""
    assert argv(tmp_path, executed(body)) == ["--a"] and [path.name for path in tmp_path.iterdir()] == ["launch.py"]
