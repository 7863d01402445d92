"""The list of engines that are wanted in a run, which people and schedulers write."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fusionrl.cli import engines
from fusionrl.observe import run_dir
from fusionrl.observe.run_dir import WANTED, EngineState, engine_url, read_wanted


def test_addresses() -> None:
    urls = [engine_url(address) for address in ("10.0.0.7:30000", " http://node-3.rack:8000/ ", "[::1]:9")]
    assert urls == ["http://10.0.0.7:30000", "http://node-3.rack:8000", "http://[::1]:9"]
    for address in ("node", ":80", "node:x", "node:70000", "https://a:1", "a:1/v1", "u@a:1", ""):
        with pytest.raises(ValueError, match="write HOST:PORT"):
            engine_url(address)


def test_a_list_that_people_write(tmp_path: Path) -> None:
    assert read_wanted(tmp_path) == ([], [])
    (tmp_path / WANTED).write_text("# mine\na:1  # the fast one\n\nhttp://b:2/\nnonsense\na:1")
    urls, errors = read_wanted(tmp_path)
    assert urls == ["http://a:1", "http://b:2"]
    assert len(errors) == 1 and errors[0].startswith("engines.txt:5: engine 'nonsense'")
    (tmp_path / WANTED).chmod(0o664)
    run_dir.add_wanted(tmp_path, ["http://b:2", "http://c:3"])
    assert (tmp_path / WANTED).stat().st_mode & 0o777 == 0o664, "a group that could write it still can"
    assert read_wanted(tmp_path)[0] == ["http://a:1", "http://b:2", "http://c:3"]
    assert run_dir.remove_wanted(tmp_path, ["http://a:1", "http://d:4"]) == ["http://d:4"]
    assert (tmp_path / WANTED).read_text() == "# mine\n\nhttp://b:2/\nnonsense\nhttp://c:3\n"


def test_of_many_that_add_at_a_time_none_is_lost(tmp_path: Path) -> None:
    urls = [f"http://node:{port}" for port in range(1, 25)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda url: run_dir.add_wanted(tmp_path, [url]), urls))
    assert sorted(read_wanted(tmp_path)[0]) == sorted(urls)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*arguments: str) -> tuple[int, str]:
        code = engines.run([*arguments, "--run-dir", str(tmp_path)])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    code, message = command("list")
    assert code == 2 and f"--run-dir {tmp_path}: it is not a run folder" in message
    (tmp_path / "config.json").write_text("{}")
    assert command("list") == (0, "no engine of others is in this run\n")
    assert command("add")[0] == command("add", "nonsense")[0] == command("remove", "a:1")[0] == 2
    assert command("add", "a:1", "b:2")[0] == 0
    run_dir.write_states(tmp_path, [EngineState(url="http://a:1", state="serving", note="")])
    assert command("list") == (0, "http://a:1  serving\nhttp://b:2  not seen yet\n")
    assert command("remove", "a:1")[0] == 0
    run_dir.write_states(tmp_path, [EngineState(url="http://a:1", state="lost", note="it died\nin two lines")])
    assert command("list") == (0, "http://b:2  not seen yet\nhttp://a:1  lost  it died\n")
