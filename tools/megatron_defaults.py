"""List the options whose default differs between Megatron's argument parser and its configuration classes.

    python tools/megatron_defaults.py --arguments Megatron-LM/megatron/training/arguments.py

slime's users know the parser's defaults; fusionrl builds the classes. The parser is not part of the package
megatron-core: name the file of a checkout of the same version. One line an option: class, option, default of the class,
default of the parser. docs/guides/from-slime.md says what fusionrl does with each.
"""

import argparse
import ast
import dataclasses
from pathlib import Path


def parser_defaults(source: str) -> dict[str, object]:
    """Name of an option → its default, for all calls of `add_argument` whose default is a literal."""
    defaults: dict[str, object] = {}
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        names = [str(part.value) for part in node.args if isinstance(part, ast.Constant)]
        if node.func.attr != "add_argument" or not names:
            continue
        values = {word.arg: word.value for word in node.keywords}
        try:
            keywords = {
                name: ast.literal_eval(values[name]) for name in ("dest", "action", "default") if name in values
            }
        except ValueError:  # a default that is computed
            continue
        action = keywords.get("action")
        switch = {"store_true": False, "store_false": True}.get(action) if isinstance(action, str) else None
        name = str(keywords.get("dest") or max(names, key=len).lstrip("-").replace("-", "_"))
        defaults[name] = keywords.get("default", switch)
    return defaults


def class_defaults() -> dict[tuple[str, str], object]:
    """(class, option) → default, of Megatron-core's classes as installed."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    plain = {field.name for field in dataclasses.fields(TransformerConfig)}
    return {
        (kind.__name__, field.name): field.default
        for kind in (TransformerConfig, MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
        for field in dataclasses.fields(kind)
        if field.default is not dataclasses.MISSING and not (kind is MLATransformerConfig and field.name in plain)
    }


def differences(source: str) -> list[tuple[str, str, object, object]]:
    """(class, option, default of the class, default of the parser) of each option whose defaults differ."""
    of_parser = parser_defaults(source)
    return [
        (kind, name, default, of_parser[name])
        for (kind, name), default in class_defaults().items()
        if name in of_parser and of_parser[name] != default
    ]


def main() -> None:
    """Print the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arguments", type=Path, required=True, help="arguments.py of Megatron-LM")
    for kind, name, of_class, of_parser in differences(parser.parse_args().arguments.read_text(encoding="utf-8")):
        print(f"{kind} {name}: class {of_class!r}, parser {of_parser!r}")


if __name__ == "__main__":
    main()
