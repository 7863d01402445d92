"""Loss masks of conversations: what the assistant says and its end marker, whatever the template is."""

import importlib.util
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusionrl.config.rollout import DataGroup
from fusionrl.data.render import tokens_after_assistant
from fusionrl.data.supervised import LOSS_MASK_TYPES, MultiTurnLossMaskGenerator, conversation_to_sample
from tests.tiny_model import CHAT_TEMPLATE, make_byte_tokenizer

Messages = list[dict[str, Any]]

LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# No special tokens at all: a turn ends with a blank line.
PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# As Qwen3's: the thoughts of earlier turns are taken out again once a new question has come.
STRIPS_HISTORY = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Opens every answer with a thought that the conversation's own answers do not have.
OPENS_A_THOUGHT = CHAT_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
# The template's own marks; the first have header and line break in them, the second lack the end marker.
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}@bot {{ m['content'] }}<|im_end|>\n"
    "{% endgeneration %}{% else %}@{{ m['role'] }} {{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}@bot {% endif %}"
)
ENDLESS = MARKED.replace("<|im_end|>\n{% endgeneration %}", "{% endgeneration %}<|im_end|>\n")
SPECIAL = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]
SPECIAL += ["<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"]


def tokenizer_with(template: str | None, tokenizer: Any = None) -> Any:
    tokenizer = tokenizer or make_byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.bos_token = "<|begin_of_text|>"
    tokenizer.chat_template = template
    return tokenizer


def merging_tokenizer(template: str) -> Any:
    """Of real merges: tokens hold their leading space, runs of spaces and line breaks are one token each."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # as Llama 3's: offsets without spaces
    text = ["def f(x):\n        return x\n\n\n", "the answer is the answer\n\n", "\n\n        if so\n"] * 20
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return tokenizer_with(template, PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>"))


def turns(*contents: str) -> Messages:
    roles = ["system", *["user", "assistant"] * len(contents)]
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


def runs(tokenizer: Any, messages: Messages, kind: str = "auto", tools: Any = None, **kwargs: Any) -> list[str]:
    """Decoded text of each run of trained tokens; the tokens are those of the whole conversation."""
    generator = MultiTurnLossMaskGenerator(tokenizer, kind, kwargs)
    tokens, mask = generator.get_loss_mask(messages, tools)
    assert tokens == tokenizer.apply_chat_template(messages, tools=tools, return_dict=False, **kwargs)
    assert len(mask) == len(tokens)
    return generator.get_text_from_loss_mask(tokens, mask)


@pytest.mark.parametrize(
    ("template", "end"),
    [(CHAT_TEMPLATE, "<|im_end|>"), (LLAMA3, "<|eot_id|>"), (PLAIN, "\n\n")],
)
@pytest.mark.parametrize(
    "contents",
    [("S", "U", "A one"), ("S", "U1", "A1", "U2 é", "A2 ü\nmore", "U3", "A3"), ("S", "U", "A", "and?")],
)
@pytest.mark.parametrize("kind", ["auto", "prefix"])
def test_exactly_the_assistants_words_are_trained(template: str, end: str, contents: list[str], kind: str) -> None:
    tokenizer = tokenizer_with(template)
    messages = turns(*contents)
    assert runs(tokenizer, messages, kind) == [text + end for text in contents[2::2]]
    sample = conversation_to_sample(messages, MultiTurnLossMaskGenerator(tokenizer, kind))
    # The response is from the first trained token to the last, and the text is that of the template.
    assert sample.loss_mask[0] == sample.loss_mask[-1] == 1  # type: ignore[index]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert whole.startswith(tokenizer.decode(sample.tokens))
    assert len(contents) % 2 == 0 or whole.strip() == tokenizer.decode(sample.tokens).strip()
    # At inference the engine sees these very ids as the prompt.
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert tokenizer.encode(prompt, add_special_tokens=False) == list(sample.tokens[: sample.prompt_length])


@pytest.mark.parametrize("template", [STRIPS_HISTORY, OPENS_A_THOUGHT], ids=["strips", "opens"])
def test_the_prefix_way_refuses_a_template_that_rewrites_turns(template: str) -> None:
    messages = turns("S", "U1", "<think>hm</think>A1", "U2", "<think>ha</think>A2")
    with pytest.raises(ValueError, match=r"--loss-mask-type prefix .* does not render turns one after another"):
        runs(tokenizer_with(template), messages, "prefix")
    if template == STRIPS_HISTORY:
        assert runs(tokenizer_with(template), messages) == ["A1<|im_end|>", "<think>ha</think>A2<|im_end|>"]


def test_the_templates_own_marks() -> None:
    tokenizer = tokenizer_with(MARKED)
    assert MultiTurnLossMaskGenerator(tokenizer).tokenizer_type == "template"
    messages = turns("S", "U1", "A1 é", "U2", "A2")
    assert runs(tokenizer, messages) == ["A1 é<|im_end|>", "A2<|im_end|>"]
    messages[2]["step_loss_mask"] = 0
    assert runs(tokenizer, messages, "template") == ["A2<|im_end|>"]


def test_a_turn_without_loss() -> None:
    messages = turns("S", "U1", "A1", "U2", "A2", "U3", "A3")
    messages[2]["step_loss_mask"], messages[4]["step_loss_mask"] = 0, 1
    for kind in ("auto", "prefix"):
        tokenizer = tokenizer_with(CHAT_TEMPLATE)
        assert runs(tokenizer, messages, kind) == ["A2<|im_end|>", "A3<|im_end|>"]
    sample = conversation_to_sample(messages, MultiTurnLossMaskGenerator(tokenizer))
    assert "A1" in tokenizer.decode(sample.tokens[: sample.prompt_length])
    messages[4]["step_loss_mask"] = messages[6]["step_loss_mask"] = 0
    with pytest.raises(ValueError, match="nothing to train on: step_loss_mask"):
        conversation_to_sample(messages, MultiTurnLossMaskGenerator(tokenizer))
    messages[4]["step_loss_mask"] = 0.5
    with pytest.raises(ValueError, match=r"step_loss_mask of a message is neither 0 nor 1 \(0.5\)"):
        conversation_to_sample(messages, MultiTurnLossMaskGenerator(tokenizer))


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, LLAMA3], ids=["chatml", "llama3"])
def test_tokens_of_several_characters(template: str) -> None:
    """Offsets without leading spaces, runs of spaces, a character of several tokens: none is lost or left out."""
    tokenizer = merging_tokenizer(template)
    end = "<|im_end|>" if template == CHAT_TEMPLATE else "<|eot_id|>"
    for said in ("the answer", "def f(x):\n        return x\n\n\n        if so", "漢字 é        é"):
        assert runs(tokenizer, turns("S", "U the answer", said, "U", "é")) == [said + end, "é" + end]


def test_a_token_with_a_part_of_the_header() -> None:
    """White space in it is not trained; a word is refused."""
    tokenizer = merging_tokenizer(CHAT_TEMPLATE)
    assert tokenizer.tokenize("\n\n\nA") == ["ĊĊ", "Ċ", "A"]  # the first is header and answer
    assert runs(tokenizer, turns("S", "U", "\n\nA")) == ["\nA<|im_end|>"]
    with pytest.raises(ValueError, match=r"a token belongs to the assistant's turn only in part \(' the'\)"):
        runs(merging_tokenizer(PLAIN), turns("S", "U", "the answer"))


@pytest.mark.parametrize(
    ("template", "kind", "messages", "message"),
    [
        (CHAT_TEMPLATE, "auto", turns("S", "U"), "no assistant turn"),
        (CHAT_TEMPLATE, "llama3", turns("S", "U", "A"), "llama3 gives .*1 in the messages, 0 in .*; other types are"),
        (CHAT_TEMPLATE, "template", turns("S", "U", "A"), "no {% generation %} blocks"),
        (CHAT_TEMPLATE, "qwen2", turns("S", "U", "A"), "--loss-mask-type qwen2: unknown; known are auto, chatml"),
        # What a user wrote must not be taken for a turn, nor what the assistant wrote for an end.
        (CHAT_TEMPLATE, "auto", turns("S", "<|im_start|>assistant\nB", "A"), "1 in the messages, 2 in the text"),
        (CHAT_TEMPLATE, "auto", turns("S", "U", "A <|im_end|> B"), r"'A <\|im_end\|> B' is not in 'A <"),
        (CHAT_TEMPLATE, "auto", turns("S", "U", "A<|im_end|>"), "holds the end marker"),
        (CHAT_TEMPLATE.replace("t']", "t'] | upper"), "auto", turns("S", "U", "abc"), "does not render 'content' .*ab"),
        (ENDLESS, "auto", turns("S", "U", "A"), "no end marker follows a turn.*'A'"),
        ("{{ raise_exception('no thanks') }}", "auto", turns("S", "U", "A"), "refuses it .no thanks"),
        (PLAIN, "auto", turns("S", "U", "A")[2:], "begins with the assistant"),
        (None, "auto", turns("S", "U", "A"), "has none"),
    ],
)
def test_a_wrong_mask_is_an_error(template: str | None, kind: str, messages: Messages, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        runs(tokenizer_with(template), messages, kind)


def test_the_flag_has_every_type() -> None:
    assert typing.get_args(DataGroup.model_fields["loss_mask_type"].annotation) == LOSS_MASK_TYPES


def test_template_arguments_reach_the_template() -> None:
    tokenizer = tokenizer_with("{% if loud %}!{% endif %}{% if tools %}{{ tools[0].name }}{% endif %}" + CHAT_TEMPLATE)
    masks = MultiTurnLossMaskGenerator(tokenizer, template_kwargs={"loud": True})
    sample = conversation_to_sample(turns("S", "U", "A"), masks, [{"name": "T"}])
    assert tokenizer.decode(sample.tokens).startswith("!T<|im_start|>system")


TOOLS = [{"type": "function", "function": {"name": "add", "description": "d", "parameters": {"type": "object"}}}]
CALL = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
THOUGHTS = turns("S", "U1", "<think>\nhm\n</think>\n\nA1 é", "U2", "<think>\nha\n</think>\n\nA2")
WITH_TOOLS: Messages = [
    *turns("S", "U1"),
    {"role": "assistant", "content": "let me", "tool_calls": CALL},
    {"role": "tool", "content": "3"},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "again", "tool_calls": CALL * 2},
    {"role": "tool", "content": "5"},
    *turns("", "", "it is 3", "U2", "bye")[2:],
]


def public(name: str) -> Any:
    """A tokenizer with a public model's template, as TRL's package carries it."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package trl: scripts/setup-env.sh examples")
    return tokenizer_with((Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8"))


def test_a_tool_call_of_llama3() -> None:
    call = [{"role": "assistant", "content": "", "tool_calls": CALL}, {"role": "tool", "content": "3"}]
    messages = [*turns("S", "U"), *call, *turns("", "", "it is 3")[2:]]
    found = runs(public("llama3_1"), messages, "llama3", TOOLS)
    assert found == ['{"name": "add", "parameters": {"a": 1}}<|eot_id|>', "it is 3<|eot_id|>"]


def test_qwen3_keeps_thoughts_of_the_last_turn_only() -> None:
    tokenizer = public("qwen3")
    assert runs(tokenizer, THOUGHTS, "qwen3") == ["A1 é<|im_end|>", "<think>\nha\n</think>\n\nA2<|im_end|>"]
    assert runs(tokenizer, WITH_TOOLS, "qwen3", TOOLS) == [
        f"let me\n{CALL_TEXT}<|im_end|>",
        f"again\n{CALL_TEXT}\n{CALL_TEXT}<|im_end|>",
        "it is 3<|im_end|>",
        "<think>\n\n</think>\n\nbye<|im_end|>",
    ]
    only_a_call = [*turns("S", "U"), {"role": "assistant", "content": None, "tool_calls": CALL}]
    assert runs(tokenizer, only_a_call, "qwen3", TOOLS) == [f"<think>\n\n</think>\n\n{CALL_TEXT}<|im_end|>"]
    reasoned = [*turns("S", "U"), {"role": "assistant", "content": "A", "reasoning_content": "R"}]
    assert runs(tokenizer, reasoned, "qwen3") == ["<think>\nR\n</think>\n\nA<|im_end|>"]
    with pytest.raises(ValueError, match="one after another"):
        runs(tokenizer, THOUGHTS, "prefix")


def test_an_empty_thought_of_the_generation_prompt_is_not_trained() -> None:
    messages = turns("S", "U1", "A1", "U2", "A2")
    assert runs(public("qwen3"), messages)[1] == "<think>\n\n</think>\n\nA2<|im_end|>"
    for tokenizer, kwargs in ((public("qwen3"), {"enable_thinking": False}), (public("qwen3_5_nothink"), {})):
        assert runs(tokenizer, messages, "qwen3", **kwargs) == ["A1<|im_end|>", "A2<|im_end|>"]
    # A generation prompt that opens the thought: what is generated begins within it.
    assert runs(public("qwen3_5_think"), THOUGHTS) == ["A1 é<|im_end|>", "ha\n</think>\n\nA2<|im_end|>"]


MARKED_BY_TRL = {"qwen2_5": "qwen", "qwen3_8": "qwen3", "lfm2_v2": "chatml", "llama3": "llama3"}
MARKED_BY_TRL |= {"qwen3_instruct_2507": "qwen3", "nemotron_3_nano": "chatml"}


@pytest.mark.parametrize(("name", "kind"), MARKED_BY_TRL.items())
def test_marks_agree_with_blocks_that_others_put_into_the_templates(name: str, kind: str) -> None:
    """TRL's variants for training render the same text, with blocks around the assistant's turns."""
    for messages, tools in ((THOUGHTS, None), (WITH_TOOLS, TOOLS))[: 1 if name == "llama3" else 2]:
        marked = MultiTurnLossMaskGenerator(public(name)).get_loss_mask(messages, tools)
        assert marked == MultiTurnLossMaskGenerator(public(name), kind).get_loss_mask(messages, tools)
        blocks = MultiTurnLossMaskGenerator(public(f"{name}_training"), "template").get_loss_mask(messages, tools)
        assert marked == blocks and np.sum(marked[1]) > 0


@pytest.mark.parametrize(
    ("name", "kind", "end"),
    [("deepseek_r1_distill", "distill_qwen", "<｜end▁of▁sentence｜>"), ("llama3_2", "llama3", "<|eot_id|>")],
)
def test_public_templates_without_blocks(name: str, kind: str, end: str) -> None:
    for way in (kind, "auto"):
        assert runs(public(name), turns("S", "U1", "A1 é", "U2", "A2"), way) == [f"A1 é{end}", f"A2{end}"]


TOOL_MESSAGES = [
    {"role": "tool", "tool_call_id": "call00000", "name": "a", "content": "one"},
    {"role": "tool", "tool_call_id": "call00001", "name": "b", "content": "two"},
]
# No end marker (as GLM's), one call at most and no text beside it (as Llama's), and a template without tools.
NO_MARKER = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>obs {{ m.content }}"
    "{% else %}<|endoftext|>{{ m.role }} {{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|endoftext|>assistant {% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('one call a turn') }}{% endif %}{{ m.tool_calls[0].function.arguments | tojson }}<|im_end|>"
    "{% else %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
WITHOUT = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no role ' + m.role) }}"
    "{% endif %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}"
)
CHANGES_THE_TURN = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' and not loop.last %} (said){% endif %}"
    "<|im_end|>{% endfor %}"
)


def after(template: str, messages: list[dict[str, Any]], end_token: int | None) -> str:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = template
    tokens = tokens_after_assistant(messages, tokenizer, end_token=end_token)
    return tokenizer.decode(tokens)


def test_what_follows_an_assistants_turn() -> None:
    end, start_of_message, endoftext = 258, 257, 256
    both = "<|im_start|>obs one<|im_start|>obs two<|endoftext|>assistant "
    assert after(NO_MARKER, TOOL_MESSAGES, None) == both
    # The model's own last token is the one that begins the answer: it is not there twice.
    assert after(NO_MARKER, TOOL_MESSAGES, start_of_message) == both.removeprefix("<|im_start|>")
    assert after(NO_MARKER, TOOL_MESSAGES, endoftext) == both
    for messages, text in ((TOOL_MESSAGES[:1], "[tool] one"), (TOOL_MESSAGES, "[tool] one<|im_end|>[tool] two")):
        assert after(STRICT, messages, end) == text + "<|im_end|>[assistant] "
        assert after(STRICT, messages, None) == "<|im_end|>" + text + "<|im_end|>[assistant] "
    assert after(STRICT, [{"role": "user", "content": "and?"}], end) == "[user] and?<|im_end|>[assistant] "


@pytest.mark.parametrize(
    ("template", "reason"), [(WITHOUT, "no role tool"), (CHANGES_THE_TURN, "otherwise when messages follow")]
)
def test_templates_that_cannot_go_on_are_named(template: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"the chat template of .*\['tool', 'tool'\] after an assistant.*{reason}"):
        after(template, TOOL_MESSAGES, 258)
