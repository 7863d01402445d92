"""`fusionrl engines add|remove|list`: engines that you start yourself join and leave a live run."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from fusionrl.cli import refuse
from fusionrl.observe.run_dir import WANTED, add_wanted, engine_url, read_states, read_wanted, remove_wanted


def run(argv: Sequence[str]) -> int:
    """Change or show the list of a run's engines; returns the exit code, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="fusionrl engines", description=__doc__)
    parser.add_argument("action", choices=("add", "remove", "list"))
    parser.add_argument("address", nargs="*", help="HOST:PORT of an SGLang server")
    parser.add_argument("--run-dir", required=True, help="folder of the run")
    options = parser.parse_args(argv)
    try:
        print(_act(options.action, options.address, Path(options.run_dir)))
    except ValueError as error:
        return refuse([str(error)])
    return 0


def _act(action: str, addresses: Sequence[str], run_dir: Path) -> str:
    if not (run_dir / "config.json").is_file():
        raise ValueError(f"--run-dir {run_dir}: it is not a run folder")
    if action == "list":
        return _table(run_dir)
    if not addresses:
        raise ValueError(f"fusionrl engines {action}: name the engines, HOST:PORT")
    urls = [engine_url(address) for address in addresses]
    if action == "add":
        add_wanted(run_dir, urls)
        return f"{len(urls)} in {run_dir / WANTED}; each joins with the next weight push: fusionrl engines list"
    if missing := remove_wanted(run_dir, urls):
        raise ValueError(f"fusionrl engines remove: {', '.join(missing)} is not in {run_dir / WANTED}")
    return f"{len(urls)} taken out of {run_dir / WANTED}; each leaves when it has answered its requests"


def _table(run_dir: Path) -> str:
    engines, errors = read_wanted(run_dir)
    states = {state["url"]: state for state in read_states(run_dir)}
    lines = list(errors)
    for url in [*engines, *(url for url in states if url not in engines)]:
        state = states.get(url)
        note = f"  {state['note'].splitlines()[0]}" if state is not None and state["note"] else ""
        lines.append(f"{url}  {'not seen yet' if state is None else state['state']}{note}")
    return "\n".join(lines) or "no engine of others is in this run"
