"""Tables of Markdown pages that the code reads itself: a page for people and the data are one file."""

import re
from collections.abc import Iterator


def table_rows(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (section, cells) of each row of the page's tables whose first cell begins with code."""
    section = ""
    for line in page.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| `"):
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            yield section, [cell.strip().replace("\\|", "|").replace("&lt;", "<") for cell in cells]


def codes(cell: str) -> list[str]:
    """Return the texts in a cell that are code."""
    return re.findall(r"`([^`]+)`", cell)
