"""A launch script is read without being run: variables, arrays, sourced files, loops, conditions."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusionrl.compat.slime.scripts.script import Script, read_script
from fusionrl.compat.slime.scripts.shell import left_parts, plain, quoted


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
        ("X=1", "$X ${X}2 '$X' \"a $X\"", ["1", "12", "$X", "a 1"]),
        ("X='a b'", '$X "$X"', ["a", "b", "a b"]),
        ("X=", "$X end", ["end"]),
        ("X=", '"$X" end', ["", "end"]),
        ("", '${X:-two words} "${X:-two words}"', ["two", "words", "two words"]),
        ("X=3", "${X:-1} ${X:+set} ${Y:+set} $((X * 2 + 1)) $(( 1 << 2 ))", ["3", "set", "7", "$(( 1 << 2 ))"]),
        ("A=(--a 1 # --b 2\n  --c 'x y'\n)", "${A[@]}", ["--a", "1", "--c", "x", "y"]),
        ("A=(--a 1 'x y')", '"${A[@]}" ${#A[@]} ${A[1]}', ["--a", "1", "x y", "3", "1"]),
        ("A=(1); A+=(2); A[0]=9", "${A[@]}", ["9", "2"]),
        ("", "${NOTHING[@]} end", ["end"]),
        ("P=/a/b.c.d", "${P##*/} ${P%.*} ${P%%.*} ${P#/}", ["b.c.d", "/a/b.c", "/a/b", "a/b.c.d"]),
        ("for ((i=0; i<3; i++)); do A+=($i); done", "${A[@]}", ["0", "1", "2"]),
        ('for x in a b; do A+=("$x$x"); done', "${A[@]}", ["aa", "bb"]),
        ("A=(0 1)\nprintf -v F '[%s]' \"$(IFS=', '; echo \"${A[*]}\")\"", '"$F"', ["[0,1]"]),
        ("", "$(seq 2 3 8) $(echo hi)", ["2", "5", "8", "hi"]),
        ("X=2; if [ $X -gt 1 ]; then Y=a; elif true; then Y=b; else Y=c; fi", "$Y", ["a"]),
        ("if [[ 1 == 2 || x != x ]]; then Y=a; else Y=c; fi", "$Y", ["c"]),
        ('X=8\n[ -z "$X" ] && X=1\n[ -n "$X" ] || X=2', "$X", ["8"]),
        ("f() { Y=of_f; }\nf", "$Y", ["of_f"]),
        ("X=7B\ncase $X in\n  1B|2B) Y=a ;;\n  (7*) Y=b; Z=1 ;;\n  *) Y=c\nesac", "$Y $Z", ["b", "1"]),
        ("Y=a\ncase $1 in --big) Y=b ;; esac", "$Y", ["${Y}"]),
        ("while read -r line; do X=1; done < file\nuntil curl x; do sleep 1; done\nX=2", "$X", ["2"]),
        ("cat <<EOF > /dev/null\n( ' unclosed\nEOF\nX=1", "$X", ["1"]),
        ("export X=1 Y", "$X", ["1"]),
        ('L="--a 1  --b"\nread -ra A <<< "$L"', "${A[@]} end", ["--a", "1", "--b", "end"]),
        ("IFS=', ' read -r -a A <<< 'x,y z'", "${A[@]}", ["x", "y", "z"]),
        ("read -r X Y <<< 'a b c'", '"$X" "$Y"', ["a", "b c"]),
        ('read -r -d \'\' X <<EOF || true\n{"n": "$N"}\nEOF\n', '"$X"', ['{"n": "${N}"}']),
        ("mapfile -t A <<< $'a'", "${A[@]}", ["$a"]),
        ('X=$(cat <<\'EOF\'\n{"a": "$b"}\nEOF\n)', '"$X"', ['{"a": "$b"}']),
        ("read -ra A < list.txt", "--x ${A[@]}", ["--x", "${A[@]}"]),
        (
            'f() { X=$1; shift; A=("$@"); N=$#; }\nf one --b "c d"',
            '$X $N "${A[@]}" "$@"',
            ["one", "2", "--b", "c d", "$@"],
        ),
        ("f() { local X=${1:-none} Y=${2:-none}; A+=($X$Y); }\nf a b\nf", "${A[@]}", ["ab", "nonenone"]),
        ("f() { A=(${@:2}); g ${A[@]}; }\ng() { B=$2; }\nf 1 2 3", "${A[@]} $B $1", ["2", "3", "3", "$1"]),
        ('f() { for a; do A+=("$a"); done; }\nf 1 "2 3"', '"${A[@]}"', ["1", "2 3"]),
        (
            "while [[ $# -gt 0 ]]; do case $1 in --n) N=$2; shift 2 ;; esac; done\n: ${N:=1}\nX=${N:-8}",
            "$X $N",
            ["1", "1"],
        ),
        ("i=0; while [ $i -lt 2 ]; do A+=($i); i=$((i + 1)); done", "${A[@]}", ["0", "1"]),
        ("for host in $(cat hosts); do A+=(--h $host); done", "--a ${A[@]}", ["--a", "${A[@]}"]),
        ("A=(--a 1); [ -f x ] && A+=(--b)", "${A[@]}", ["--a", "1", "${A[@]:2}"]),
        ("if [ -f x ]; then A=(1 --b 2); else A=(1 --b 3); fi", "${A[@]}", ["1", "${A[@]:1}"]),
        ("A=('x y')", '${A[@]+"${A[@]}"} ${B[@]+"${B[@]}"}', ["x y"]),
        (
            "X=Qwen3-4B",
            "${X,,} ${X^^} ${X//-/_} ${X:0:4} ${X/Qwen3/q}",
            ["qwen3-4b", "QWEN3-4B", "Qwen3_4B", "Qwen", "q-4B"],
        ),
        ("exec > >(tee -a log) 2>&1\ndiff <(sort a) b\nX=1", "$X", ["1"]),
        ("exec 2> >(tee -a 'l o g' >&2)\nX=1", "$X", ["1"]),
    ],
)
def test_words(tmp_path: Path, before: str, word: str, wanted: list[str]) -> None:
    assert argv(tmp_path, f"{before}\npython train.py {word}\n") == wanted


def test_what_cannot_be_known_is_left_as_it_is(tmp_path: Path) -> None:
    """Nothing is executed: a command and a variable of the environment stay in the printed word, and expand there."""
    text = 'D=$(date +%s)\npython3 train.py --save "$HOME/run $D" --n $(nvidia-smi -L | wc -l) --k ${WANDB_KEY}\n'
    (launch,) = read(tmp_path, text).launches
    assert [quoted(word) for word in launch.argv] == [
        *("--save", '"${HOME}/run $(date +%s)"', "--n", '"$(nvidia-smi -L | wc -l)"', "--k", '"${WANDB_KEY}"'),
    ]
    assert left_parts(launch.argv[1]) == ["${HOME}", "$(date +%s)"]
    assert argv(tmp_path, text, HOME="/h")[1].startswith("/h/run")


def test_nothing_is_run(tmp_path: Path) -> None:
    argv(tmp_path, f"touch {tmp_path}/made\nX=$(touch {tmp_path}/made2)\npython train.py $X\n")
    assert [path.name for path in tmp_path.iterdir()] == ["run.sh"]


def test_a_variable_that_depends_on_an_unknown_condition_is_left(tmp_path: Path) -> None:
    text = "if command -v nvidia-smi; then N=8; M=1; else N=1; M=1; fi\npython train.py --n $N --m $M\n"
    assert argv(tmp_path, text) == ["--n", "${N}", "--m", "1"]


def test_sourced_model_files(tmp_path: Path) -> None:
    """Beside the script; with a variable for that command alone; under the folder of another machine."""
    (tmp_path / "scripts" / "models").mkdir(parents=True)
    (tmp_path / "examples").mkdir()
    (tmp_path / "scripts/models/base.sh").write_text('MODEL_ARGS=(--rotary-base "${BASE:-10}")\n')
    (tmp_path / "scripts/models/big.sh").write_text(
        'BASE=20 source "$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)/base.sh"\n'
    )
    launch = "\npython train.py ${MODEL_ARGS[@]} $BASE\n"
    here = 'D="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'
    for text in (f'{here}source "$D/../scripts/models/big.sh"', 'source "/root/slime/scripts/models/big.sh"'):
        (launched,) = read(tmp_path / "examples", text + launch).launches
        assert [plain(word) for word in launched.argv] == ["--rotary-base", "20", "${BASE}"]
    found = read(tmp_path, "source /nowhere/else/x.sh" + launch)
    assert [note.partition(": ")[0] for note in found.notes] == ["source /nowhere/else/x.sh", "${MODEL_ARGS[@]}"]


def test_jobs_of_ray_continued_lines_and_pipes(tmp_path: Path) -> None:
    text = (
        'ENV="{\\"env_vars\\": {\\"A\\": \\"1\\"}}"\n'
        'ray job submit --address=http://x \\\n   --runtime-env-json="${ENV}" \\\n'
        "   -- python3 -u ${D}/train_async.py \\\n   --lr 1e-6 \\\n   # a comment\n   2>&1 | tee log\n"
    )
    (launch,) = read(tmp_path, text).launches
    assert (launch.program, launch.argv, launch.env) == ("train_async", ("--lr", "1e-6"), '{"env_vars": {"A": "1"}}')


@pytest.mark.parametrize(
    "command",
    [
        'bash -c "python3 train.py ${A[*]} --seed 1"',
        'eval "python3 train.py ${A[*]} --seed 1"',
        "ssh host 'cd /x && python3 train.py --lr 1 --seed 1'",
        "CMD='python3 train.py --lr 1'; $CMD --seed 1",
        "torchrun --nproc-per-node 8 train.py ${A[@]} --seed 1",
        "nohup uv run train.py ${A[@]} --seed 1 > log 2>&1 &",
        'f() { python3 train.py "$@"; }\nf "${A[@]}" --seed 1',
        "until python3 train.py ${A[@]} --seed 1; do sleep 9; done",
        "while true; do python3 train.py ${A[@]} --seed 1; n=$((n + 1)); done",
        "for n in $(cat hosts); do python3 train.py ${A[@]} --seed 1; done",
        "(set -x; python3 train.py ${A[@]} --seed 1) > >(tee log)",
        'exec > >(tee -a "log $X") 2>&1\npython3 train.py ${A[@]} --seed 1',
    ],
)
def test_ways_to_start_a_run(tmp_path: Path, command: str) -> None:
    (tmp_path / "hosts").write_text("")
    assert argv(tmp_path, f"A=(--lr 1)\n{command}\n") == ["--lr", "1", "--seed", "1"]


@pytest.mark.parametrize("command", ["pkill -f train.py", "echo python train.py --x", "cp train.py /x/train.py"])
def test_a_command_that_names_the_program_starts_no_run(tmp_path: Path, command: str) -> None:
    assert argv(tmp_path, f"{command}\npython train.py --seed 1\n") == ["--seed", "1"]


def test_a_script_that_runs_another(tmp_path: Path) -> None:
    """Its arguments are that script's; what that script sets is its own."""
    (tmp_path / "base.sh").write_text("X=2\npython train.py --lr ${LR:-1} --model $1\n")
    text = "X=1\nLR=5\nbash ./base.sh small\npython train.py --x $X\n"
    assert [launch.argv for launch in read(tmp_path, text).launches] == [
        ("--lr", "5", "--model", "small"),
        ("--x", "1"),
    ]


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("python train.py ${A[@]}", "${A[@]}:"),
        ("read -ra A < file\npython train.py ${A[@]}", "${A} is read from a command or a file"),
        ("mapfile -t A < <(make args)\npython train.py ${A[@]}", "${A} is read from a command or a file"),
        ("JUDGE=x python train.py --a", "the launch sets JUDGE"),
        ("cat > $(mktemp) <<EOF\na: 1\nEOF\npython train.py --a", "the script writes $(mktemp) from a here-document"),
        ("A=(1); test -d /x && A+=(2)\npython train.py ${A[@]}", "${A[@]} depends on a condition"),
    ],
)
def test_what_is_lost_is_named(tmp_path: Path, text: str, note: str) -> None:
    assert any(line.startswith(note) for line in read(tmp_path, text + "\n").notes)


def test_a_lost_backslash_is_named(tmp_path: Path) -> None:
    script = read(tmp_path, "A=(--lr 1)\npython train.py --colocate\n   ${A[@]} \\\n   --seed 1\n")
    assert script.launches[0].argv == ("--colocate", "--lr", "1", "--seed", "1")
    assert "a `\\` is missing before --lr" in script.notes[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo hi\n", "starts no train.py"),
        ("python train_lora.py --x 1\ntorchrun a/sft.py\n", "train_async.py; it starts train_lora.py, a/sft.py"),
        ("X=(1\npython train.py\n", "not closed"),
        ('echo "open\n', "missing"),
        ("if true; then\npython train.py\n", "line "),
        ("select X in a b; do break; done\n", "`select` is not read"),
        ("case $X in a) ;;\n", "esac is missing"),
    ],
)
def test_a_text_that_is_no_launch_script(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match="run.sh") as caught:
        read(tmp_path, text)
    assert message in str(caught.value)
