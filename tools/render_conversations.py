"""Render conversations as supervised rows, as prompts of RL and as requests of a session: the same text, or a refusal.

    python tools/render_conversations.py [--templates FOLDER] [--verbose]

Each conversation is written twice: as data sets write it (arguments of calls as objects, fields that are null) and as
clients of OpenAI's protocol do (arguments as JSON text, contents as parts). FOLDER has chat templates as .jinja files;
without it, those that the package trl ships. One line a template: how many conversations are rendered in one text by
every way, and how many are refused, each refusal naming the field. Exits with 1 if a conversation has two renderings.
"""

import argparse
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fusionrl.data.columns import PromptColumns
from fusionrl.data.prompts import render_prompt
from fusionrl.data.render import render_messages
from fusionrl.data.sample import Sample
from fusionrl.data.supervised import MultiTurnLossMaskGenerator
from fusionrl.rollout.sessions.messages import Refused
from fusionrl.rollout.sessions.openai_api import read
from fusionrl.rollout.sessions.session import Segments

Message = dict[str, Any]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def say(role: str, content: object, **more: object) -> Message:
    """Return a message."""
    return {"role": role, "content": content, **more}


def call(number: int, arguments: object, content: object = "") -> Message:
    """Return a message of the assistant that calls the tool."""
    function = {"name": "weather", "arguments": arguments}
    return say("assistant", content, tool_calls=[{"id": f"call{number:05d}", "type": "function", "function": function}])


def conversations() -> dict[str, tuple[list[Message], list[Message], list[Message] | None]]:
    """Name → (as data sets write it, as clients write it, tools); the last message is the assistant's."""
    user, answer = say("user", "Hi there"), say("assistant", "Hello you")
    city = {"city": 'Zürich "am See"'}
    question, rain = say("user", "Weather?"), say("assistant", "It rains.")
    result = say("tool", "rain", tool_call_id="call00001", name="weather")
    plain = [user, answer]
    return {
        "one turn": (plain, plain, None),
        "a system message": ([say("system", "Be brief."), *plain], [say("system", "Be brief."), *plain], None),
        "several turns": ([user, answer, question, rain], [user, answer, question, rain], None),
        "parts": (plain, [say("user", [{"type": "text", "text": "Hi there"}]), answer], None),
        "several parts": (
            [say("user", [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]), answer, question, rain],
            [say("user", [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]), answer, question, rain],
            None,
        ),
        "nulls": (
            [user, say("assistant", "Hello you", tool_calls=None, reasoning_content=None, name=None)],
            [user, say("assistant", "Hello you", refusal=None, tool_calls=[])],
            None,
        ),
        "no tools": (plain, plain, []),
        "a call": ([question, call(1, city)], [question, call(1, json.dumps(city, ensure_ascii=False), None)], TOOLS),
        "a call and its answer": (
            [question, call(1, city), result, rain],
            [question, call(1, json.dumps(city), None), {k: v for k, v in result.items() if k != "name"}, rain],
            TOOLS,
        ),
        "text beside a call": (
            [question, call(1, city, "I look."), result, rain],
            [question, call(1, json.dumps(city), "I look."), result, rain],
            TOOLS,
        ),
        "a call without arguments": ([question, call(1, {})], [question, call(1, "", None)], TOOLS),
        "a thought": (
            [user, say("assistant", "Hello you", reasoning_content="They greet me.")],
            [user, say("assistant", "Hello you", reasoning="They greet me.")],
            None,
        ),
        "a thought and a call": (
            [question, call(1, city) | {"reasoning_content": "I look."}],
            [question, call(1, json.dumps(city), None) | {"thinking": "I look."}],
            TOOLS,
        ),
        "a weight": (
            [user, say("assistant", "Hello you", weight=0), question, rain],
            [user, say("assistant", "Hello you", weight=0), question, say("assistant", "It rains.", weight=1)],
            None,
        ),
    }


def texts(tokenizer: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield (way, its text or `refused: …`); ways of the same kind must agree.

    "whole": the whole conversation, as supervised training tokenizes it; "prompt": all but the last message, as RL and
    sessions ask for the next one.
    """
    of_data, of_client, tools = conversations()[name]
    for spelling in (of_data, of_client):
        yield "whole", _or_refusal(lambda: _supervised(tokenizer, spelling, tools))  # noqa: B023
        yield "prompt", _or_refusal(lambda: _prompt(tokenizer, spelling[:-1], tools))  # noqa: B023
        yield "prompt", _or_refusal(lambda: _session(tokenizer, spelling[:-1], tools))  # noqa: B023


def _or_refusal(render: Any) -> str:
    try:
        return str(render())
    except (ValueError, Refused) as error:
        return f"refused: {error}"


def _supervised(tokenizer: Any, messages: list[Message], tools: object) -> str:
    masks = MultiTurnLossMaskGenerator(tokenizer, "auto")
    try:
        tokens, _ = masks.get_loss_mask(messages, tools)
    except ValueError as error:
        if "--loss-mask-type" not in str(error):
            raise
        # No mask can be made, so nothing is trained; the text must be the same nevertheless.
        return render_messages(tokenizer, messages, tools).text
    return str(tokenizer.decode(tokens))


def _prompt(tokenizer: Any, messages: list[Message], tools: Any) -> str:
    return render_prompt(messages, tokenizer, PromptColumns("", apply_chat_template=True), tools).text


def _session(tokenizer: Any, messages: list[Message], tools: Any) -> str:
    conversation = read({"messages": [{k: v for k, v in m.items() if k != "weight"} for m in messages], "tools": tools})
    return str(Segments(tokenizer, {}, Sample()).begun(conversation, {}).prompt)


def check(template: Path, tokenizer: Any) -> tuple[Counter[str], list[str], list[str]]:
    """Return how many conversations are rendered and refused, those with two renderings, and each refusal."""
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    tokenizer.name_or_path = template.stem
    counts: Counter[str] = Counter()
    differences, refused = [], []
    for name in conversations():
        masks: dict[str, list[str]] = {"whole": [], "prompt": []}
        for way, text in texts(tokenizer, name):
            masks[way].append(text)
        all_refusals: set[str] = set()
        for way, several in masks.items():
            refusals = [text for text in several if text.startswith("refused: ")]
            all_refusals |= set(refusals)
            if len(set(several)) > 1 and len(refusals) < len(several):
                differences.append(f"{template.stem}: {name}: {way}: " + " | ".join(repr(text) for text in several))
        counts["refused" if all_refusals else "same"] += 1
        refused += [f"    {name}: {text[:300]}" for text in sorted(all_refusals)]
    return counts, differences, refused


def find_templates(folder: Path | None) -> list[Path]:
    """Return the .jinja files of `folder`, or those of the package trl."""
    if folder is None:
        spec = importlib.util.find_spec("trl")
        if spec is None or spec.origin is None:
            raise SystemExit("render_conversations: error: the package trl is not installed; name --templates FOLDER")
        folder = Path(spec.origin).parent / "chat_templates"
    return sorted(folder.glob("*.jinja"))


def main() -> int:
    """Check all templates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--templates", type=Path, help="a folder of .jinja files")
    parser.add_argument("--verbose", action="store_true", help="print each refusal")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.tiny_model import make_byte_tokenizer

    total: Counter[str] = Counter()
    differences: list[str] = []
    for template in find_templates(args.templates):
        tokenizer = make_byte_tokenizer(1 << 16)
        tokenizer.bos_token = tokenizer.eos_token  # some templates write it
        counts, different, refused = check(template, tokenizer)
        total += counts
        differences += different
        print(f"{template.stem:34} {counts['same']:3} the same {counts['refused']:3} refused")
        if args.verbose:
            print("\n".join(refused))
    print("\n".join(differences))
    print(
        f"{sum(total.values())} conversations: {total['same']} the same, {total['refused']} refused, "
        f"{len(differences)} with two renderings"
    )
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
