"""The documentation: the site builds, README leads into it, and the files that its pages name exist."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").rglob("*.md"))]
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)")
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_MENTION = re.compile(r"`(?:fusionrl/)?((?:[a-z_]+/)+[a-z_0-9]+\.py)`")
_FILE = re.compile(r"(?<![\w/.{-])((?:fusionrl|plugins|scripts|tests|tools|requirements)/[\w./-]*\w)(?![\w*<{…])")
_ANCHORED = re.compile(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)")
_IN_CODE = re.compile(r"docs/([\w/-]+\.md)#([\w-]+)")
_PAGE_IN_CODE = re.compile(r"docs/([\w/-]+\.md)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. `--strict`: a link or anchor that leads nowhere, and a page outside `nav`, fail the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


def test_search_finds_a_flag(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    pages = {entry["location"].partition("#")[0] for entry in entries if "--max-staleness" in entry["text"]}
    assert {"reference/flags.html", "guides/pipelines.html"} <= pages
    # The search takes a leading dash as "not" unless this script removes it from the query.
    assert "search-flags.js" in (site / "index.html").read_text(encoding="utf-8")


def test_lists_and_tables_are_shown_as_such(site: Path) -> None:
    """A list or table that directly follows a line of text is part of that paragraph for MkDocs, unlike on GitHub."""
    found = re.compile(r"^(- \w|\d\. |\| )", re.MULTILINE)
    wrong = []
    for page in site.rglob("*.html"):
        paragraphs = re.findall(r"<p>(.*?)</p>", page.read_text(encoding="utf-8"), re.DOTALL)
        wrong += [f"{page.name}: {text[:80]}" for text in paragraphs if found.search(text)]
    assert not wrong, "put an empty line before: " + "\n".join(wrong)


def test_named_files_exist() -> None:
    """Those of the pages, and those of a docstring or comment that says `trainer/packed_row.py`."""
    missing = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        files = [file for file in _FILE.findall(text) if not (REPO / file).exists()]
        files += [file for file in _MENTION.findall(text) if not _exists(file, REPO, REPO / "fusionrl")]
        missing += [f"{page.name}: {file}" for file in files]
    for path in (REPO / "fusionrl").rglob("*.py"):
        files = [file for file in _MENTION.findall(path.read_text()) if not file.startswith("path/to/")]
        files = [file for file in files if not _exists(file, REPO, REPO / "fusionrl", path.parent)]
        missing += [f"{path.relative_to(REPO)}: {file}" for file in files]
    assert not missing, "\n".join(missing)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings by GitHub's rule: letters, digits, `_` and `-`; a repeated one gets a number."""
    repeats: dict[str, int] = {}
    names = set()
    for line in _CODE.sub("", page.read_text(encoding="utf-8")).splitlines():
        if not (match := re.match(r"#{1,6}\s+(.*?)\s*#*$", line)):
            continue
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", match[1])  # of a link its text
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        number = repeats[name] = repeats.get(name, -1) + 1
        names.add(f"{name}-{number}" if number else name)
    return names


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_from_outside_the_site_lead_to_a_page_and_heading(name: str) -> None:
    page = REPO / name
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    wrong = [link for link in _LINK.findall(text) if not (page.parent / link).exists()]
    for target, anchor in _ANCHORED.findall(text):
        path = (page.parent / target) if target else page
        if path.suffix == ".md" and path.exists() and anchor not in anchors(path):
            wrong.append(f"{target}#{anchor}")
    assert not wrong, f"{name} links to what is not there: {wrong}"


def test_messages_and_docstrings_lead_to_pages_and_headings() -> None:
    wrong = []
    for file in [*REPO.glob("fusionrl/**/*.py"), *REPO.glob("tools/**/*.py"), *REPO.glob("scripts/*")]:
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        wrong += [f"{file.name}: {name}" for name in _PAGE_IN_CODE.findall(text) if not (REPO / "docs" / name).exists()]
        for name, anchor in _IN_CODE.findall(text):
            page = REPO / "docs" / name
            if page.exists() and anchor not in anchors(page):
                wrong.append(f"{file.name}: {name}#{anchor}")
    assert not wrong


def test_a_newcomer_is_told_how_to_get_the_command() -> None:
    """README says it before the first command that needs it, and so does the environment's script."""
    before = re.split(r"^(?:fusionrl train --|python tools/)", (REPO / "README.md").read_text(), flags=re.MULTILINE)
    assert len(before) > 1 and "source .venv/bin/activate" in before[0]
    assert "source $venv/bin/activate" in (REPO / "scripts" / "setup-env.sh").read_text()


def _exists(file: str, *roots: Path) -> bool:
    return any((root / file).exists() for root in roots)


def test_every_estimator_and_policy_loss_is_described() -> None:
    from fusionrl.algorithms.estimators import ESTIMATORS, LOSSES

    page = (REPO / "docs" / "guides" / "algorithms.md").read_text(encoding="utf-8")
    missing = [name for name in (*ESTIMATORS, *LOSSES) if not re.search(rf"\b{name}\b", page)]
    assert not missing, f"describe {missing} in docs/guides/algorithms.md"


@pytest.mark.parametrize("name", ["commands", "plugin_api"])
def test_a_generated_page_is_up_to_date(name: str) -> None:
    from tools.reference_pages import PAGES

    page = (REPO / "docs" / "reference" / f"{name}.md").read_text(encoding="utf-8")
    command = f"python -m tools.reference_pages {name} > docs/reference/{name}.md"
    assert page == PAGES[name](), f"run: {command}"


def test_every_command_has_a_row() -> None:
    from fusionrl.cli import COMMANDS

    page = (REPO / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    rows = "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    assert [name for name in COMMANDS if f"`{name}`" not in rows] == []


# Flow of docs/internals/reading-path.md → how many files a reader may have to open. Raise no limit: move code.
# Every file that a flow's section names counts.
FLOWS = {
    "One prompt becomes a trained token": 35,
    "One flag is declared, checked and used": 10,
    "One weight reaches a verified engine": 18,
    "One reward is chosen and graded": 6,
    "One engine dies and is replaced": 12,
}
_FLOW = re.compile(r"^## (.+) \(at most (\d+) files\)$", re.MULTILINE)
_STEP = re.compile(r"(\d+)\. `[\w.]+` in `(fusionrl/[\w/]+\.py)`: \S.*\.")
_NAME_AND_FILE = re.compile(r"`([\w.]+)`(?: and `([\w.]+)`)? in\s+`(fusionrl/[\w/]+\.py)`")


def test_the_reading_path_names_what_exists_and_stays_short() -> None:
    page = (REPO / "docs" / "internals" / "reading-path.md").read_text(encoding="utf-8")
    wrong = []
    for *names, file in _NAME_AND_FILE.findall(page):
        defined = set(defined_names(REPO / file)) if (REPO / file).is_file() else set()
        wrong += [f"{file} does not define {name}" for name in names if name and name not in defined]
    assert not wrong, "\n".join(wrong)
    _, *sections = _FLOW.split(page)
    titles, limits, texts = sections[::3], sections[1::3], sections[2::3]
    assert dict(zip(titles, map(int, limits), strict=True)) == FLOWS and page.count("\n## ") == len(FLOWS)
    for title, text in zip(titles, texts, strict=True):
        lines = [line for line in text.splitlines() if line[:1].isdigit()]
        steps = [(line, _STEP.fullmatch(line)) for line in lines]
        assert not [line for line, step in steps if step is None], "write: N. `name` in `fusionrl/….py`: what it does."
        assert [int(step[1]) for _, step in steps if step] == [*range(1, len(steps) + 1)], title
        files = set(re.findall(r"`(fusionrl/[\w/]+\.py)`", text))
        assert 0 < len(files) <= FLOWS[title], f"{title}: {len(files)} files"


def defined_names(path: Path) -> Iterator[str]:
    """Yield functions, classes and constants of a module, and those of its classes as `Class.name`."""
    pending: list[tuple[str, ast.AST]] = [("", ast.parse(path.read_text(encoding="utf-8")))]
    while pending:
        prefix, parent = pending.pop()
        for node in ast.iter_child_nodes(parent):
            match node:
                case ast.ClassDef():
                    yield prefix + node.name
                    pending.append((f"{prefix}{node.name}.", node))
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    yield prefix + node.name
                case ast.Assign():
                    yield from (prefix + target.id for target in node.targets if isinstance(target, ast.Name))
                case ast.AnnAssign(target=ast.Name(id=name)):
                    yield prefix + name
                case ast.If() | ast.Try():
                    pending.append((prefix, node))
