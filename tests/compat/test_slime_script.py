"""A launch script runs in the sandbox: the launches that it starts, what stays unknown, and what it cannot touch."""

import contextlib
import shlex
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusionrl.compat.slime import script as script_module
from fusionrl.compat.slime.arguments import left_parts, plain, quoted
from fusionrl.compat.slime.script import Script, read_script
from fusionrl.sandbox import Limits, SandboxError, probe


def read(folder: Path, text: str, **values: str) -> Script:
    file = folder / "run.sh"
    file.write_text(text)
    return read_script(file, values)


def argv(folder: Path, text: str, **values: str) -> list[str]:
    """The arguments of the script's one launch."""
    (launch,) = read(folder, text, **values).launches
    return [plain(word) for word in launch.argv]


@pytest.mark.parametrize(
    ("before", "word", "wanted"),
    [
        ('read -ra A <<< --a\nmapfile -t B < <(printf "%s\\n" x "y z")', '"${A[@]}" "${B[@]}"', ["--a", "x", "y z"]),
        ("set -eu\nfalse\n[ 1 = 2 ] || exit 3\nexec > >(tee -a 'l o g') 2>&1", "$X end", ["${X}", "end"]),
        ("f() { X=${1:-none}; shift; }\nf\nif [ $# -lt 2 ]; then exit 1; fi", "$X $1 ${3:-c}", ["none", "$1", "c"]),
        ("while [[ $# -gt 0 ]]; do case $1 in --n) N=$2; shift 2 ;; esac; done", "${N:-8}", ["8"]),
        ("until curl x; do sleep 1; done\nwhile [ ! -f /done ]; do sleep 9; done", '--lr "$@"', ["--lr", "$@"]),
        ('mkdir -p /root/x\ncd /root/x\nD=$(cd "$DIR" && pwd)', '$PWD "$D/a"', ["/root/x", "${DIR}/a"]),
        ("for h in $(cat /hosts); do A+=(--h $h); done", "${A[@]}", ["--h", "$(cat /hosts)"]),
        ('[ -z "$X" ] && X=1\nif [ -z "$DIR" ]; then\n  exit 1\nfi', "$X $DIR", ["1", "${DIR}"]),
        ("V=$(pip list | grep x | awk '{print $2}')", '"$V/a"', ["$(pip list | grep x | awk '{print $2}')/a"]),
        ("[[ $RANK -eq 0 ]] && A=a\nN=$RANK\nif (( N < 1 )); then B=b; fi", "$A $B", ["a", "b"]),
        ("kill $$\n/bin/kill -9 $$\ncommand kill -9 $$\necho $$ | xargs kill -9", "end", ["end"]),
        ("cd /tmp/boxes", "$PWD /tmp/box/a", ["/tmp/boxes", "/tmp/box/a"]),
        ("X=$(printf %300s | tr ' ' x)", "--sglang-config $X", ["--sglang-config", "x" * 300]),
        (
            "N=$(nvidia-smi -L | wc -l)\nM=$(my_tool --get)\ndeclare -A B=([k]=v)",
            "$N $M ${B[k]}",
            ["8", "$(my_tool --get)", "v"],
        ),
    ],
)
def test_words(tmp_path: Path, before: str, word: str, wanted: list[str]) -> None:
    assert argv(tmp_path, f"{before}\npython train.py {word}\n") == wanted


def test_what_only_the_machine_knows_is_left_as_it_is(tmp_path: Path) -> None:
    """A command and a variable of the environment stay in the printed word, and expand there."""
    text = 'D=$(date +%s)\npython3 train.py --save "$HOME/run $D" --k ${WANDB_KEY} $1\n'
    (launch,) = read(tmp_path, text).launches
    assert [quoted(word) for word in launch.argv] == [
        *("--save", '"${HOME}/run $(date +%s)"', "--k", '"${WANDB_KEY}"', '"$1"')
    ]
    assert left_parts(launch.argv[1]) == ["${HOME}", "$(date +%s)"]
    assert argv(tmp_path, text, HOME="/h", **{"1": "one"})[1::3] == ["/h/run $(date +%s)", "one"]
    forged = '"; touch made; $("'
    text = f"A=$'\\ue000'{shlex.quote(forged)}$'\\ue001'\npython train.py \"$A\" $(cat $DIR/x)\n"
    (launch,) = read(tmp_path, text).launches
    assert [quoted(word) for word in launch.argv] == [shlex.quote(forged), '"$(cat ${DIR}/x)"']


def test_a_script_touches_nothing_outside_and_reaches_no_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        text = f"printf -v P '\\57%s' {str(tmp_path)[1:]}\nfor F in {tmp_path} $P; do\n"
        text += "  touch $F/made\n  echo >> $F/run.sh\n  rm -rf $F/run.sh\ndone\n"
        text += f"exec 9<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}\npython train.py --p $P\n"
        assert argv(tmp_path, text) == ["--p", str(tmp_path)]
        with pytest.raises(BlockingIOError):
            server.accept()
    assert [path.name for path in tmp_path.iterdir()] == ["run.sh"] and (tmp_path / "run.sh").read_text() == text


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("python train.py --a\nwhile :; do :; done", "the script did not end within 3 s"),
        ("while true; do python train.py --a; done", "the script starts runs in a loop without an end"),
    ],
)
def test_a_script_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, note: str) -> None:
    monkeypatch.setattr(script_module, "_WALL_S", 3.0 if ":; do" in text else 300.0)
    monkeypatch.setattr(script_module, "_LIMITS", replace(script_module._LIMITS, wall_s=600.0))
    script = read(tmp_path, text)
    assert [launch.argv for launch in script.launches] == [("--a",)] and script.notes[-1].startswith(note)
    assert ":; do" in text or "the script has started 200 programs: what it starts later is not known" in script.notes


def test_the_weak_mode_runs_scripts_but_only_where_the_user_accepts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weak = replace(script_module._LIMITS, namespaces=False)
    with contextlib.suppress(SandboxError):  # root's interpreter in a folder of root's alone
        if "Landlock" in probe(Limits(namespaces=False, wall_s=30.0)).split(";")[0]:
            with monkeypatch.context() as patch:
                patch.setattr(script_module, "_LIMITS", weak)
                assert argv(tmp_path, "cat > /x.yaml <<< a\npython train.py --a /x.yaml\n") == ["--a", "/x.yaml"]
    limits = []

    def run(*_: Any, **named: Any) -> None:
        limits.append(named["limits"])
        raise SandboxError("no namespaces; accept the weak mode with --allow-weak-sandbox")

    monkeypatch.setattr(script_module, "run_python_sync", run)
    with pytest.raises(ValueError, match="in the sandbox: .*--allow-weak-sandbox"):
        read(tmp_path, "python train.py --a\n")
    assert [limit.namespaces for limit in limits] == [True]


@pytest.mark.parametrize(
    ("answer", "is_cut", "message"),
    [
        (b"", False, r"no answer \(0\)"),
        (b"", True, "more than 16 MiB"),
        (b"{}", False, "cannot be read: Field required"),
        (b"[" * 100_000, False, "cannot be read: "),
    ],
)
def test_an_answer_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes, is_cut: bool, message: str
) -> None:
    result = SimpleNamespace(answer=answer, answer_cut=is_cut, killed_by=None, exit_code=0, stderr="")
    monkeypatch.setattr(script_module, "run_python_sync", lambda *_, **__: result)
    with pytest.raises(ValueError, match=f"run.sh: .* in the sandbox: .*{message}"):
        read(tmp_path, "python train.py\n")


def test_what_a_script_sees_of_its_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of its folder first, up to a limit; nothing that a link outside leads to, and nothing that is gone."""
    folder = tmp_path / "checkout" / "examples"
    for name in (folder, tmp_path / "checkout/.git", tmp_path / "checkout/docs"):
        name.mkdir(parents=True)
    for name in ("gone.txt", "own.txt", "../docs/a.txt", "../docs/b.txt", "../../secret.txt"):
        (folder / name).write_text("x")
    (folder / "link.txt").symlink_to("../../secret.txt")
    (folder / "run.sh").write_text(
        "for F in *.txt ../docs/*.txt; do A+=($F); done\necho >> own.txt || exit 1\npython train.py ${A[@]}\n"
    )
    for path in folder.glob("[or]*"):
        path.chmod(0o444)
    read_bytes = Path.read_bytes

    def read(path: Path) -> bytes:
        if path.name == "gone.txt":
            raise PermissionError(path)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    monkeypatch.setattr(script_module, "_MAX_COPIED", 3)
    script = read_script(folder / "run.sh")
    assert script.launches[0].argv == ("own.txt", "../docs/a.txt")
    assert len(script.notes) == 1 and "checkout is large" in script.notes[0]


def test_sourced_model_files(tmp_path: Path) -> None:
    """Beside the script; with a variable for that command alone; under the folder of another machine."""
    (tmp_path / "scripts" / "models").mkdir(parents=True)
    (tmp_path / "examples").mkdir()
    (tmp_path / "scripts/models/base.sh").write_text('MODEL_ARGS=(--rotary-base "${BASE:-10}")\ndeclare Y=1\n')
    (tmp_path / "scripts/models/big.sh").write_text(
        'BASE=20 source "$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)/base.sh"\n'
    )
    launch = "\npython train.py ${MODEL_ARGS[@]} $Y\n"
    here = 'D="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'
    for text in (f'{here}. "$D/../scripts/models/big.sh"', 'source "/root/slime/scripts/models/big.sh"'):
        (launched,) = read(tmp_path / "examples", text + launch).launches
        assert launched.argv == ("--rotary-base", "20", "1")


def test_jobs_of_ray_continued_lines_and_pipes(tmp_path: Path) -> None:
    text = (
        'ENV="{\\"env_vars\\": {\\"A\\": \\"1\\"}}"\n'
        'ray job submit --address=http://x \\\n   --runtime-env-json="${ENV}" \\\n'
        "   -- python3 -u ${D}/train_async.py \\\n   --lr 1e-6 \\\n   # a comment\n   2>&1 | tee log\n"
    )
    (launch,) = read(tmp_path, text).launches
    assert (launch.program, launch.argv, launch.env) == ("train_async", ("--lr", "1e-6"), '{"env_vars": {"A": "1"}}')


def test_ways_to_start_a_run(tmp_path: Path) -> None:
    """Commands that only name the program start no run."""
    text = """
pkill -f 'python train.py'
echo python train.py --x
cp train.py /x/train.py
A=(--lr 1)
bash -c "python3 train.py ${A[*]} --seed 1"
ssh host 'cd /x && python3 train.py --lr 1 --seed 1'
ray job submit -- bash -c 'python3 train.py --lr 1 --seed 1'
torchrun --nproc-per-node 8 train.py ${A[@]} --seed 1
nohup uv run train.py ${A[@]} --seed 1 > log 2>&1 &
/opt/conda/bin/python -u "$D"/train.py ${A[@]} --seed 1
(python3 train.py ${A[@]} --seed 1) > >(tee log)
"""
    assert [launch.argv for launch in read(tmp_path, text).launches] == [("--lr", "1", "--seed", "1")] * 7
    assert argv(tmp_path, "python3 train.py --lr 1\n   --seed 1") == ["--lr", "1", "--seed", "1"]


def test_a_script_that_runs_another(tmp_path: Path) -> None:
    """Its arguments are that script's; what that script sets is its own."""
    (tmp_path / "base.sh").write_text("X=2\npython train.py --lr ${LR:-1} --model $1\n")
    text = "X=1\nexport LR=5\nbash ./base.sh small\npython train.py --x $X\n"
    assert [launch.argv for launch in read(tmp_path, text).launches] == [
        ("--lr", "5", "--model", "small"),
        ("--x", "1"),
    ]


GRANTED = [  # lines of a script, and what the note on each begins with; {} is the line's number
    ("[ $# -gt 9 ] || exit 2", "line {}: `exit 2` is passed over"),
    ("read -ra A < file", "line {}: file: No such file"),
    ("export JUDGE=x", "the launch sets JUDGE"),
    ("[ -d /x ] && A=2", "line {}: `-d /x` is false"),
    ('[[ "$KIND" = big ]]', "line {}: `[[ ${{KIND}} = big ]]` is taken as it stands"),
    ('case "$KIND" in big) A=1 ;; esac', "line {}: `case ${{KIND}} in` is taken as it stands"),
    ("[[ $NODE -eq 0 ]]", "line {}: `[[ ${{NODE}} -eq 0 ]]` counts what is not known as 0"),
    ("N=$(hostname)", ""),
    ("case $N in a) ;; esac", "line {}: `case $(hostname) in` is taken as it stands"),
    ("echo ${MORE[@]}", "${{MORE[@]}}: the script never sets it, so it expands to no arguments"),
    ('[ -n "$MODE" ] && A=1', "${{MODE}} is taken as not set"),
    ("source /no/where.sh", "source /no/where.sh: the file is not there"),
    ("nvidia-smi", "nvidia-smi is taken as 8 GPUs"),
]


def test_what_is_taken_for_granted_is_named(tmp_path: Path) -> None:
    text = "\n".join(line for line, _ in GRANTED)
    notes = [plain(note) for note in read(tmp_path, f"{text}\npython train.py --a\n").notes]
    for number, (line, beginning) in enumerate(GRANTED, 1):
        assert any(note.startswith(beginning.format(number)) for note in notes), (line, notes)
    for text, beginning in (
        ("python train.py\nenable kill\nbuiltin kill $$", "SIGTERM ended the script"),
        ("N=$((KINDS * $GPUS))", "line 1: "),
    ):
        notes = read(tmp_path, f"{text}\npython train.py --a\n").notes
        assert any(plain(note).startswith(beginning) for note in notes), notes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("python train_lora.py --x 1\ntorchrun a/sft.py\n", "train_async.py; it starts train_lora.py, a/sft.py"),
        ("if true; then\npython train.py\n", "line 3: syntax error"),
    ],
)
def test_a_text_that_is_no_launch_script(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"run.sh: it starts no train.py.*{message}"):
        read(tmp_path, text)
