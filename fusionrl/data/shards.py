"""A folder of data files as data sets are published: a split in one or several files, configurations in folders.

train.jsonl    data/test-00000-of-00001.parquet    main/train-00001-of-00002.parquet    default/train/0000.parquet
"""

from __future__ import annotations

import re
from pathlib import Path

SUFFIXES = (".parquet", ".jsonl", ".json")
_SHARD = re.compile(r"(.+?)-(\d{5})-of-(\d{5})(?:-[0-9a-f]+)?")
_ABOUT = ("dataset_infos.json", "dataset_info.json", "state.json", "dataset_dict.json")  # of a data set, not its rows


def find_splits(folder: Path) -> dict[tuple[str, str], list[Path]]:
    """(configuration, split) -> its files, in order; the configuration is "" for files in `folder` or its data/.

    A split of which a part is missing, as the files' names number them, is left out.
    """
    files_of: dict[tuple[str, str], list[Path]] = {}
    totals: dict[tuple[str, str], int] = {}
    for path in sorted(folder.rglob("*")):
        place = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in place.parts)
        if path.suffix not in SUFFIXES or path.name in _ABOUT or is_hidden or not path.is_file():
            continue
        parts, stem = list(place.parts[:-1]), path.stem
        shard = _SHARD.fullmatch(stem)
        if shard is not None:
            split = shard[1]
        elif stem.isdecimal() and parts:
            split = parts.pop()
        else:
            split = stem
        configuration = "/".join(part for part in parts if part != "data")
        files_of.setdefault((configuration, split), []).append(path)
        if shard is not None:
            totals[configuration, split] = int(shard[3])
    return {key: files for key, files in files_of.items() if totals.get(key, len(files)) == len(files)}


def choose_split(folder: Path, split: str | None, where: str) -> list[Path]:
    """The files of a split of `folder`; a configuration's only where the folder itself has none of that name.

    where  how the folder is called in messages

    Raises:
        ValueError: no such split, or several; names those that there are.
    """
    splits = find_splits(folder)
    fitting = [key for key in splits if split is not None and key[1] == split]
    if len(fitting) == 1 or ("", split) in fitting:
        return splits[min(fitting)]
    if not splits:
        raise ValueError(f"{where}: it has no whole split in {', '.join(SUFFIXES)} files")
    names = [f"{where}{'/' + subset if subset else ''}:{name}" for subset, name in sorted(fitting or splits)]
    raise ValueError(f"{where}: choose one of its splits: {', '.join(names)}")
