"""SGLang's flags from a file are those of its own parser; what the file cannot say is SGLang's to say."""

import argparse
import importlib.metadata
import importlib.util
import json
from pathlib import Path

import pytest

from fusionrl.config import upstream_flags
from fusionrl.config.upstream_flags import KeptParser, describe, kept_parser

NEEDS_SGLANG = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
PLAIN = ["--max-running-requests 256", "--mem-fraction-static 0.3", "--enable-metrics"]
OTHERS = ["--served-model-name -a", "--cuda-graph-bs-decode 1 2", "--max-running-requests many", "--enable-metrics yes"]
OTHERS += ['--json-model-override-args {"a":1}', "--attention-backend none", "--no-such-flag 1", "--port 1"]


def _outcome(parser: argparse.ArgumentParser, option: str, values: list[str]) -> object:
    try:
        return upstream_flags.parse_with(parser, option, values, upstream_flags.SGLANG_OWNED)
    except upstream_flags.UpstreamError as error:
        return str(error)


@NEEDS_SGLANG
def test_the_file_says_what_sglang_says() -> None:
    real = upstream_flags._import_sglang_parser()
    options = json.loads(json.dumps(describe(real)))
    imports: list[int] = []
    kept = KeptParser(options, lambda: imports.append(1) or real)
    for text in (*PLAIN, *OTHERS):
        option, *values = text.split()
        assert _outcome(kept, option, values) == _outcome(real, option, values), option
        assert text in OTHERS or not imports, "plain options need no SGLang"
    assert upstream_flags.option_names(kept, "sglang") == upstream_flags.option_names(real, "sglang")
    for name in real._option_string_actions:
        assert upstream_flags.is_switch(kept, name) == upstream_flags.is_switch(real, name)


def _parser() -> argparse.ArgumentParser:
    parser = upstream_flags._QuietParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--number", type=int)
    return parser


def test_a_file_is_written_once_and_read_by_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "source.py"
    source.write_text("1")
    made: list[int] = []

    def get() -> argparse.ArgumentParser:
        return kept_parser("package", "1.0", [source], lambda: made.append(1) or _parser())

    assert not isinstance(get(), KeptParser) and len(made) == 1
    (file,) = (tmp_path / "fusionrl").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    kept = get()
    assert isinstance(kept, KeptParser) and len(made) == 1
    assert _outcome(kept, "--number", ["3"]) == {"number": 3} and len(made) == 1
    assert "invalid int value" in str(_outcome(kept, "--number", ["x"])) and len(made) == 2
    file.chmod(0o666)
    assert not isinstance(get(), KeptParser), "somebody else may have written it"
    file.unlink()
    file.symlink_to(source)
    assert not isinstance(get(), KeptParser)
    file.unlink()
    get()
    source.write_text("another version")
    assert not isinstance(get(), KeptParser)
    assert len(list((tmp_path / "fusionrl").iterdir())) == 2


def test_an_option_that_the_file_lacks_is_the_package_s_to_refuse() -> None:
    """The package may have gained it since, in a file that the key does not know."""
    kept = KeptParser(json.loads(json.dumps(describe(_parser()))), _newer)
    assert _outcome(kept, "--new", ["3"]) == {"new": 3}
    assert upstream_flags.is_switch(kept, "--new-switch") and not upstream_flags.is_switch(kept, "--number")
    assert "--none" in str(_outcome(kept, "--none", ["3"]))


def _newer() -> argparse.ArgumentParser:
    parser = _parser()
    parser.add_argument("--new", type=int)
    parser.add_argument("--new-switch", action="store_true")
    return parser


def test_without_a_file_the_package_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache's folder cannot be made, the user has no home, or the package is a checkout on PYTHONPATH."""

    def fail(*_: object) -> Path:
        raise importlib.metadata.PackageNotFoundError if _ else RuntimeError("could not determine home directory")

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not isinstance(kept_parser("package", "1.0", [], _parser), KeptParser)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", fail)
    assert not isinstance(kept_parser("package", "1.0", [], _parser), KeptParser)
    monkeypatch.setattr(importlib.metadata, "version", fail)
    monkeypatch.setattr(upstream_flags, "_import_sglang_parser", _parser)
    assert "--number" in upstream_flags.sglang_parser.__wrapped__()._option_string_actions


@NEEDS_SGLANG
def test_the_key_knows_the_files_that_declare_options(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Path] = []
    monkeypatch.setattr(upstream_flags, "kept_parser", lambda name, version, sources, real: found.extend(sources))
    upstream_flags.sglang_parser.__wrapped__()
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent / "srt"
    assert {root / "server_args.py", *(root / "arg_groups").rglob("*.py")} <= set(found)
