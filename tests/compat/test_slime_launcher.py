"""Launchers in Python are read without being run: f-strings, dataclasses, helpers of the checkout, `execute_train`."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fusionrl.compat.slime.scripts.launch import Launch
from fusionrl.compat.slime.scripts.script import Script, read_script
from fusionrl.compat.slime.scripts.shell import plain

SLIME = "import slime.utils.external_utils.command_utils as U\n"
DATACLASS = """\
from dataclasses import dataclass, field, replace
from typing import Literal
import typer
import miles.utils.external_utils.command_utils as U

@dataclass
class Args(U.ExecuteTrainConfig):
    size: Literal["4B", "8B"] = "4B"
    nodes: int = 1
    quick: bool = False
    extra: str = ""
    world: int = field(init=False)
    stops: list[int] = field(default_factory=lambda: [1, 2])

    def __post_init__(self):
        self.world = self.nodes * 8

    @property
    def model(self):
        return f"Qwen3-{self.size}"

def parallel(args):
    match (args.size, args.nodes):
        case ("4B", 1 | 2):
            return f"--tensor-model-parallel-size {args.world // 4} "
        case ("8B", _) if args.nodes > 1:
            return "--tensor-model-parallel-size 8 "
        case _:
            raise NotImplementedError(f"no layout for {args.nodes} nodes")

def execute(args: Args):
    text = f"--hf-checkpoint /m/{args.model} --num-rollout {2 if args.quick else 3000} " + parallel(args)
    if not args.quick:
        text += "--save-interval 20 "
    text += " ".join(f"--stop{n}" for n in args.stops if n > 1)
    U.execute_train(train_args=text + f" {args.extra}", config=args, num_gpus_per_node=8, megatron_model_type=None)

@U.dataclass_cli
def main(args: Args):
    prepare(args)
    execute(args)

def prepare(args):
    U.hf_download_dataset("x/y")

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


def executed(body: str, train_args: str = "args") -> str:
    return f"{SLIME}{body}\nU.execute_train(train_args={train_args}, num_gpus_per_node=8, megatron_model_type=None)\n"


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("args = '--a 1 ' '--b '\nargs += f'--c {2 * 3}'", "--a 1 --b --c 6"),
        (
            "n = 4\nargs = f'--lr {1e-6} --x {n:03d} --y {n!r} ' + ('--z' if n > 3 else '')",
            "--lr 1e-06 --x 004 --y 4 --z",
        ),
        ("d = {'a': 1}\nd |= {'b': [1, 2]}\nimport json\nargs = f\"--env '{json.dumps(d)}'\"", None),
        ("def f(n, *, m=2, **k):\n    return f'--n {n} --m {m} --k {k[\"z\"]}'\nargs = f(1, z=3)", "--n 1 --m 2 --k 3"),
        (
            "args = ''\nfor i, x in enumerate(['a', 'b']):\n    if x == 'b':\n        break\n    args += f'--{x} {i}'",
            "--a 0",
        ),
        ("import os\nargs = f\"--k {os.environ.get('K', '7')} --p {os.path.join('/a', 'b')}\"", "--k 7 --p /a/b"),
        ('from pathlib import Path\nargs = f\'--p {Path("/a/b.c").parent / "d"}\'', "--p /a/d"),
        ("try:\n    n = {}['x']\nexcept KeyError:\n    n = 5\nargs = f'--n {n}'", "--n 5"),
        ("class M:\n    def __init__(self, n):\n        self.n = n\nm = M(3)\nm.n += 1\nargs = f'--n {m.n}'", "--n 4"),
        ("x, (y, *_) = 1, (2, 3)\nargs = '--x {} --y {z}'.format(x, z=y)", "--x 1 --y 2"),
        ("args = ' '.join(sorted({'--b', '--a'}))", "--a --b"),
        ("args = f'--n {[1, 2, 3][-1]} --m {\"abc\"[:2].upper()} --k {2**20}'", "--n 3 --m AB --k 1048576"),
    ],
)
def test_text_is_built_as_python_builds_it(tmp_path: Path, body: str, wanted: str | None) -> None:
    found = argv(tmp_path, executed(body))
    assert found == (wanted.split() if wanted else ["--env", '{"a": 1, "b": [1, 2]}'])
    done = subprocess.run([sys.executable, "-c", f"{body}\nprint(args)"], capture_output=True, text=True, check=True)
    assert found == shlex.split(done.stdout)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (
            {},
            "--hf-checkpoint /m/Qwen3-4B --num-rollout 3000 --tensor-model-parallel-size 2 --save-interval 20 --stop2",
        ),
        ({"quick": "true"}, "--hf-checkpoint /m/Qwen3-4B --num-rollout 2 --tensor-model-parallel-size 2 --stop2"),
        (
            {"size": "8B", "nodes": "2", "extra": "--seed 1"},
            "--hf-checkpoint /m/Qwen3-8B --num-rollout 3000 --tensor-model-parallel-size 8 --save-interval 20 --stop2"
            " --seed 1",
        ),
    ],
)
def test_a_dataclass_of_parameters_has_its_defaults_and_those_of_set(
    tmp_path: Path, values: dict[str, str], wanted: str
) -> None:
    assert argv(tmp_path, DATACLASS, **values) == wanted.split()


def test_a_launcher_that_raises_is_refused_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no train_async.py; .*raises NotImplementedError.*no layout for"):
        read(tmp_path, DATACLASS, nodes="9")
    with pytest.raises(ValueError, match="launch.py: it is not Python"):
        read(tmp_path, "def f(:\n")


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
    text = executed("import os, time\nrun = time.strftime('%F')\nargs = f\"--save /r/{run} --k {os.environ['K']}\"")
    assert argv(tmp_path, text) == ["--save", "/r/${time_strftime_F}", "--k", "${K}"]
    assert argv(tmp_path, text, K="3", time_strftime_F="x") == ["--save", "/r/x", "--k", "3"]
    script = read(tmp_path, executed("import torch\nargs = '--a'\nif torch.cuda.is_available():\n    args += ' --b'"))
    assert script.launches[0].argv == ("--a",)
    assert script.notes == ["`torch.cuda.is_available()` (line 4) is taken as false: it is not known"]


def test_the_flags_of_the_model_and_the_helpers_of_the_checkout(tmp_path: Path) -> None:
    """A shell's file as slime has it, a function of Python as miles has it, and modules beside the launcher."""
    models = tmp_path / "scripts" / "models"
    models.mkdir(parents=True)
    (models / "small.sh").write_text("MODEL_ARGS=(--num-layers $((1 + 1)))\n")
    (models / "base.py").write_text(
        "import os\ndef model_args(base=None):\n    base = base or os.environ.get('BASE') or '10'\n"
        "    return ('--swiglu '\n            f'--rotary-base {base} ')\n"
    )
    (models / "large.py").write_text(
        "from model_args_utils import load_sibling_model_args, moe_layer_freq\ndef model_args():\n    return"
        " load_sibling_model_args(__file__, 'base', base=20) + ' --moe '"
        " + moe_layer_freq(nlayers=3, first_k_dense_replace=1)\n"
    )
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "parts.py").write_text(
        "import torch\nWIDTH = 8\ndef more(n): return run(n)\ndef run(n): return f'--n {n} --w {WIDTH} '\n"
    )
    folder = tmp_path / "examples"
    folder.mkdir()
    body = f"{SLIME}from common.parts import more\nimport common.parts as p\n"
    call = "U.execute_train(more(1) + f'--v {p.WIDTH}', 8, {kind!r}, extra_env_vars={{'JUDGE': 'x'}})\n"
    shape = {"small": ["--num-layers", "2"], "base": ["--swiglu", "--rotary-base", "10"]}
    shape["large"] = ["--swiglu", "--rotary-base", "20", "--moe", "[0,1,1]"]
    for kind, words in shape.items():
        (launch,) = read(
            folder, body + call.replace("{kind!r}", repr(kind)).replace("{{", "{").replace("}}", "}")
        ).launches
        assert list(launch.argv) == [*words, "--n", "1", "--w", "8", "--v", "8"]
        assert launch.env == '{"env_vars": {"JUDGE": "x"}}'
    (folder / "run.sh").write_text(
        'LINE="$(BASE=30 python3 "$PWD/miles/model_args_utils.py" "base")" || exit 1\nread -ra A <<< "$LINE"\n'
        'python3 train.py "${A[@]}"\n'
    )
    assert read_script(folder / "run.sh").launches[0].argv == ("--swiglu", "--rotary-base", "30")
    script = read(folder, body + call.replace("{kind!r}", "'none'").replace("{{", "{").replace("}}", "}"))
    assert "scripts/models has no none" in script.notes[0]


@pytest.mark.parametrize(
    "call",
    [
        "os.system(f'cd /x && python train.py --n {n}')",
        "subprocess.run(['python', 'train.py', '--n', str(n)], check=True)",
        "subprocess.Popen(f'python train.py --n {n}', shell=True)",
        "U.exec_command(f'ray job submit -- python3 train.py --n {n}')",
    ],
)
def test_commands_that_start_a_run(tmp_path: Path, call: str) -> None:
    assert argv(tmp_path, f"{SLIME}import os, subprocess\nn = 3\n{call}\n") == ["--n", "3"]


def test_a_file_that_a_launcher_writes_is_kept(tmp_path: Path) -> None:
    script = read(
        tmp_path, executed("text = 'a: 1\\n'\nargs = f\"--custom-config-path {U.save_to_temp_file(text, 'yaml')}\"")
    )
    assert script.launches[0].argv[1] == "launch.1.yaml" and script.files == {"launch.1.yaml": "a: 1\n"}


@pytest.mark.parametrize(
    "body",
    [
        "import os\nos.system('touch made')\nopen('made', 'w').write('x')",
        "import pathlib\npathlib.Path('made').write_text('x')\npathlib.Path('made').touch()",
        "__import__('os').mkdir('made')\nexec(\"open('made', 'w')\")\neval(\"open('made', 'w')\")",
        "().__class__.__base__.__subclasses__()\n'{0.__class__}'.format(1)\ngetattr('', '__class__')",
        "x = 'a' * 10**9\ny = [0] * 10**9\nz = f'{1:999999999}'\nw = '%999999999d' % 1\nv = 9**9**9",
        "while True:\n    pass",
        "def f(): return f()\nf()",
        "l = [1]\nwhile len(l) < 10**9:\n    l = l + l",
    ],
)
def test_nothing_is_run_and_no_memory_is_filled(tmp_path: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    launches: list[Launch] = []
    with contextlib.suppress(ValueError):  # it does not end, or is too large
        launches = read(tmp_path, executed(f"args = '--a'\n{body}")).launches
    assert all(launch.argv == ("--a",) for launch in launches)
    assert [path.name for path in tmp_path.iterdir()] == ["launch.py"]
