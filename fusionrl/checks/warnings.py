"""Warnings of settings that are allowed but probably not meant, shown with the plan and when a run starts."""

from __future__ import annotations

from fusionrl.checks.algorithm import algorithm_warnings
from fusionrl.checks.chat import chat_warnings
from fusionrl.checks.effects import effect_warnings
from fusionrl.config.config import Config
from fusionrl.config.slime.translate import accepted_notes


def flag_warnings(config: Config) -> list[str]:
    """One text a finding, with flag and cure."""
    return [
        *algorithm_warnings(config),
        *effect_warnings(config),
        *chat_warnings(config),
        *accepted_notes(config.passthrough.slime),
    ]
