"""Pages of the documentation: their links lead somewhere, the index names each, and the files that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))]
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)")
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_MENTION = re.compile(r"`(?:fusionrl/)?((?:[a-z_]+/)+[a-z_0-9]+\.py)`")
_FILE = re.compile(r"(?<![\w/.{-])((?:fusionrl|plugins|scripts|tests|tools|requirements)/[\w./-]*\w)(?![\w*<{…])")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in _LINK.findall(_CODE.sub("", text)) if not (page.parent / link).exists()]
    assert not links, f"{page.name} links to what is not there: {links}"
    files = [file for file in _FILE.findall(text) if not (REPO / file).exists()]
    files += [file for file in _MENTION.findall(text) if not _exists(file, REPO, REPO / "fusionrl")]
    assert not files, f"{page.name} names files that are not there: {sorted(set(files))}"


_ANCHORED = re.compile(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)")
_IN_CODE = re.compile(r"(?:docs/)?([\w-]+\.md)#([\w-]+)")
_PAGE_IN_CODE = re.compile(r"docs/([\w-]+\.md)")


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings by GitHub's rule: letters, digits, `_` and `-`; a repeated one gets a number."""
    found: dict[str, int] = {}
    names = set()
    for line in _CODE.sub("", page.read_text(encoding="utf-8")).splitlines():
        if not (match := re.match(r"#{1,6}\s+(.*?)\s*#*$", line)):
            continue
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", match[1])  # of a link its text
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        number = found[name] = found.get(name, -1) + 1
        names.add(f"{name}-{number}" if number else name)
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_a_heading(page: Path) -> None:
    wrong = []
    for target, anchor in _ANCHORED.findall(_CODE.sub("", page.read_text(encoding="utf-8"))):
        path = (page.parent / target) if target else page
        if path.suffix == ".md" and anchor not in anchors(path):
            wrong.append(f"{target}#{anchor}")
    assert not wrong, f"{page.name} links to headings that are not there: {wrong}"


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
    """README and the environment's script say it before the first command that needs it."""
    text = (REPO / "README.md").read_text(encoding="utf-8")
    needs = re.search(r"^(fusionrl train --|python tools/)", text, re.MULTILINE)
    assert needs is not None
    assert "source .venv/bin/activate" in text[: needs.start()]
    assert "source $venv/bin/activate" in (REPO / "scripts" / "setup-env.sh").read_text(encoding="utf-8")


def test_the_index_names_every_page() -> None:
    index = REPO / "docs" / "README.md"
    linked = {(index.parent / link).resolve() for link in _LINK.findall(index.read_text(encoding="utf-8"))}
    missing = [page.name for page in PAGES if page != index and page.resolve() not in linked]
    assert not missing, f"docs/README.md does not link to {missing}"


def test_docstrings_name_files_that_exist() -> None:
    """A docstring or comment that says `trainer/packed_batch.py` means a file of the package."""
    missing = []
    for path in sorted((REPO / "fusionrl").rglob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found = [file for file in _MENTION.findall(line) if not file.startswith("path/to/")]
            found = [file for file in found if not _exists(file, REPO, REPO / "fusionrl", path.parent)]
            missing += [f"{path.relative_to(REPO)}:{number}: {file}" for file in found]
    assert not missing, "\n".join(missing)


def _exists(file: str, *roots: Path) -> bool:
    return any((root / file).exists() for root in roots)


def test_every_estimator_and_policy_loss_is_described() -> None:
    from fusionrl.algorithms.estimators import ESTIMATORS
    from fusionrl.algorithms.losses import LOSSES

    page = (REPO / "docs" / "algorithms.md").read_text(encoding="utf-8")
    named = [*ESTIMATORS, *(name for name, loss in LOSSES.items() if loss.is_flag)]
    missing = [name for name in named if not re.search(rf"\b{name}\b", page)]
    assert not missing, f"describe {missing} in docs/algorithms.md"


def test_each_defect_of_the_gpu_paths_has_a_test() -> None:
    """docs/without-a-gpu.md lists what reading found: each of the twelve names tests that exist, and its stage."""
    from tools.proof.stages import STAGES

    page = (REPO / "docs" / "without-a-gpu.md").read_text(encoding="utf-8")
    section = page[page.index("## Twelve defects") :].split("\n## ", 2)[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if re.match(r"\| \d", line)]
    assert [row[0] for row in rows] == [str(number) for number in range(1, 13)]
    stages, missing = {stage.name for stage in STAGES}, []
    for number, _, tests, shown in rows:
        file, count = "", 0
        for name in re.findall(r"`([\w./]+)`", tests):
            if name.endswith(".py"):
                file = name
            elif name.startswith("test_"):
                count += 1
                if not re.search(rf"^def {name}\(", (REPO / file).read_text(encoding="utf-8"), re.MULTILINE):
                    missing.append(f"{number}: {file}::{name}")
        missing += [f"{number}: no test"] if not count else []
        missing += [f"{number}: stage {name}" for name in re.findall(r"`([\w.-]+)`", shown) if name not in stages]
    assert not missing, missing
