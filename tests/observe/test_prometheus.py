"""`fusionrl track --to prometheus`, and the dashboard that reads what it serves."""

import json
import re
import socket
import threading
import urllib.error
import urllib.request
from contextlib import closing, nullcontext, suppress
from pathlib import Path

import pytest

from fusionrl import cli
from fusionrl.engines.process import PortReservation
from fusionrl.observe.glossary import entry_of
from fusionrl.observe.metrics import Line, MetricsSink
from fusionrl.observe.run_dir import RunDir
from fusionrl.observe.trackers import Prometheus, Target
from tests.own_process import wait_until

DASHBOARD = Path(__file__).parents[2] / "docs" / "guides" / "grafana-dashboard.json"
NAME = 'a "run" \\ of\nmine'


def get(port: int, path: str = "/metrics", host: str = "127.0.0.1") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Host": host})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return str(answer.read().decode())


def test_the_newest_values_are_served() -> None:
    """After two lines, of a run with a name that needs escapes; not to a name that a foreign page lets point here."""
    served = Prometheus(Target(Path("runs/x"), "p", NAME, "id", True, {}, address="127.0.0.1:0"))
    with closing(served):
        served.log(Line(1, 100.0, {"train/loss": 0.5, "eval/a/pass@4": 1e-9}, 1, 10))
        served.log(Line(2, 200.5, {"train/loss": -0.25}, 1, 20))
        for refused in ({"path": "/"}, {"host": "evil.example:9464"}):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                get(served.port, **refused)
        text = get(served.port)
        assert get(served.port, host="localhost") == text, "without a port, as at port 80"
    assert [line for line in text.splitlines() if not line.startswith("#")] == [
        r'fusionrl_metric{run="a \"run\" \\ of\nmine",name="train/loss"} -0.25',
        r'fusionrl_metric{run="a \"run\" \\ of\nmine",name="eval/a/pass@4"} 1e-09',
        r'fusionrl_step{run="a \"run\" \\ of\nmine"} 2',
        r'fusionrl_step_time_seconds{run="a \"run\" \\ of\nmine"} 200.5',
    ]


def test_beside_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins before the first step, shows each, and ends with the run; it remembers nothing."""
    monkeypatch.setattr("fusionrl.observe.track._POLL_S", 0.05)
    monkeypatch.setattr("fusionrl.observe.track.until_stopped", nullcontext)  # for the main thread
    reserved, run = PortReservation("127.0.0.1"), tmp_path / "run"
    port, held = reserved.port, RunDir(run)
    args = ["track", str(run), "--to", "prometheus", "--follow", "--address", f"127.0.0.1:{port}"]
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(cli.main(args)))
    thread.start()
    with MetricsSink(run, 1) as sink:
        sink.log(1, {"train/loss": 0.5})

    def is_served() -> bool:
        with suppress(OSError):  # it is only starting
            text = get(port)
            return 'name="train/loss"} 0.5' in text and 'fusionrl_step{run="run"} 1' in text
        return False

    wait_until(is_served)
    reserved.release()
    held.close()
    thread.join(20)
    assert codes == [0] and not (run / "trackers.json").exists()


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MetricsSink(tmp_path, 1) as sink:
        sink.log(1, {"train/loss": 0.5})
    for args, said in (([], "give --follow"), (["--follow", "--address", "9464"], "expected HOST:PORT")):
        assert cli.main(["track", str(tmp_path), "--to", "prometheus", *args]) == 2
        assert said in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert cli.main(["track", str(tmp_path), "--to", "prometheus", "--follow", "--address", address]) == 2
        assert "cannot be opened" in capsys.readouterr().err


def test_the_dashboard_shows_metrics_that_exist() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 10 and all('run=~"$run"' in query for query in queries)
    names = [name for query in queries for name in re.findall(r'name=~?"([^"]+)"', query)]
    missing = [name for name in names if entry_of(name.replace("[^/]+", "x")) is None]
    assert not missing, f"no run reports {missing}"
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
