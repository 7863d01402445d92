"""What slime's examples talk to, stood in for: a tiny model, servers, and packages that are not installed.

The model writes what an agent would: calls of tools, answers, ends of thoughts. Each of these texts is one token, which
its random weights make likely, so that a few sampled tokens reach all branches of an example.
"""

import base64
import io
import json
import random
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PHRASES = (
    *("<search>who was it</search>", "<answer>7</answer>", "<code>\nprint(3 + 4)\n</code>"),
    *("Answer: \\boxed{7}", "\\boxed{7}", "</think>\n\\boxed{7}", "Judgment: 1", " seven", " 7", "<think>"),
    '<tool_call>\n{"name": "look", "arguments": {"key": "a"}}\n</tool_call>',
    '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(3 + 4)"}}\n</tool_call>',
)
VISION_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
SCORE_CALL = '<tool_call>\n{"name": "calc_score", "arguments": {"answer": "7"}}\n</tool_call>'  # of geometry3k
PATCH, SIDE = 14, 56  # pixels
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LONGEST = 8192
_BONUS, _END_BONUS = 5.0, 7.0  # by which the logits of a phrase and of the end exceed that of another token


def write_model(folder: Path, texts: Iterable[str], *, sees: bool = False) -> None:
    """Write a random model of two layers that prefers `PHRASES`, with a tokenizer trained on `texts`.

    sees  it is a Qwen2.5-VL, which also likes to call geometry3k's tool; else a Qwen3
    """
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen3Config, Qwen3ForCausalLM

    phrases = (*PHRASES, *([SCORE_CALL] if sees else []))
    tokenizer = _tokenizer(texts, phrases, VISION_TOKENS.values() if sees else ())
    tokenizer.save_pretrained(folder)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LONGEST,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(0)
    if sees:
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**_seeing(folder, text, tokenizer)))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**text, head_dim=16))
    body = model.model.language_model if sees else model.model
    likely = [tokenizer.convert_tokens_to_ids(phrase) for phrase in phrases]
    with torch.no_grad():
        # The first coordinate is the same for all tokens, so the output layer's first column is a bias.
        body.embed_tokens.weight[:, 0] = 1.0
        for layer in body.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        largest = text["hidden_size"] ** 0.5  # about what the coordinate is behind the last norm
        model.lm_head.weight[likely, 0] = _BONUS / largest
        model.lm_head.weight[tokenizer.eos_token_id, 0] = _END_BONUS / largest
    model.save_pretrained(folder)


def _seeing(folder: Path, text: dict, tokenizer: object) -> dict:
    """Fields of a Qwen2.5-VL with this text part; its image processor's numbers are written."""
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"patch_size": PATCH, "window_size": SIDE, "fullatt_block_indexes": [1]}
    numbers = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
    numbers |= {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}
    numbers |= {"min_pixels": (2 * PATCH) ** 2, "max_pixels": 64 * (2 * PATCH) ** 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(numbers), encoding="utf-8")
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in VISION_TOKENS.items()}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": False} | ids


def image_uri(seed: int) -> str:
    """A picture of noise, as geometry3k's copy for slime has its figures: a `data:` URI."""
    from PIL import Image

    content = io.BytesIO()
    Image.frombytes("L", (SIDE, SIDE), random.Random(seed).randbytes(SIDE**2)).save(content, "PNG")
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()


def _tokenizer(texts: Iterable[str], phrases: Iterable[str], more: Iterable[str]) -> object:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=sorted(alphabet), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([*SPECIAL_TOKENS, *more])
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=LONGEST
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # all samples of a rollout connect at once; the default is 5


class StubServer:
    """An HTTP server that answers POST requests of one path by a function, and counts them."""

    def __init__(self, path: str, answer: Callable[[dict], object], port: int = 0) -> None:
        self.num_requests = 0
        owner, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                is_known = self.path == path
                body = json.dumps(answer(request) if is_known else {"error": "no such path"}).encode()
                with lock:
                    owner.num_requests += is_known
                self.send_response(200 if is_known else 404)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                """Say nothing."""

        self._server = _Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}{path}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()


def search_answer(request: dict) -> dict:
    """Answer as a retrieval server: one document for each query."""
    return {"result": [[{"id": "1", "contents": '"Seven"\nIt was 7.'}] for _ in request["queries"]]}


def teacher_answer(request: dict) -> dict:
    """Answer as an SGLang server that reads tokens: a log-prob of each, and none of the first."""
    draw = random.Random(len(request["input_ids"]))
    scored = [[-draw.random(), token, None] for token in request["input_ids"]]
    scored[0][0] = None
    meta = {"prompt_tokens": len(scored), "completion_tokens": 0, "input_token_logprobs": scored}
    return {"text": "", "meta_info": meta}


# ---------------------------------------------------------------------------------------------- packages
# The least of packages of other projects that the examples import, written anew from how the examples call them.
TAU_BENCH = {
    "tau_bench/__init__.py": "",
    "tau_bench/types.py": """
from pydantic import BaseModel

class RunConfig(BaseModel):
    model_provider: str
    user_model_provider: str
    model: str
    user_model: str = ""
    env: str = "retail"
    agent_strategy: str = "tool-calling"
    temperature: float = 0.0
    task_split: str = "test"
    user_strategy: str = "llm"

class Action(BaseModel):
    name: str
    kwargs: dict
""",
    "tau_bench/agents/__init__.py": "",
    "tau_bench/agents/base.py": "class Agent:\n    pass\n",
    "tau_bench/agents/tool_calling_agent.py": """
from tau_bench.agents.base import Agent

RESPOND_ACTION_NAME = "respond"

class ToolCallingAgent(Agent):
    def __init__(self, tools_info, wiki, model, provider, temperature=0.0):
        self.tools_info, self.wiki, self.model = tools_info, wiki, model
        self.provider, self.temperature = provider, temperature
""",
    "tau_bench/envs/__init__.py": """
from types import SimpleNamespace

class Info:
    def model_dump(self):
        return {"source": "stand-in"}

TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {
    "type": "object", "properties": {"key": {"type": "string"}}}}}

class Env:
    tools_info, wiki, steps = [TOOL], "Help the customer.", 0

    def reset(self, task_index=None):
        return SimpleNamespace(observation=f"I am customer {task_index}.", info=Info())

    def step(self, action):
        self.steps += 1
        said = "It is there." if action.name == "look" else "Go on, please."
        done = self.steps == 3
        return SimpleNamespace(observation=said, reward=float(action.name == "look"), done=done, info=Info())

def get_env(**settings):
    return Env()
""",
}
# The real package asks the router with a client of its own, which has no key: so does this one.
STRANDS = {
    "strands/__init__.py": """
import re

def tool(function):
    return function

class Agent:
    def __init__(self, model, tools, hooks, callback_handler, system_prompt):
        self.model, self.tools, self.hooks, self.system_prompt = model, tools, hooks, system_prompt

    async def invoke_async(self, prompt):
        messages = [{"role": "system", "content": self.system_prompt}, {"role": "user", "content": prompt}]
        template = self.model.tokenizer.apply_chat_template
        await self.model.start(template(messages, tokenize=False, add_generation_prompt=True))
        for _ in range(2):
            text = await self.model.turn()
            code = re.search("<code>(.*?)</code>", text, re.DOTALL)
            if not code:
                return
            self.hooks[0].tool_iter_count += 1
            self.hooks[0].tool_call_count += 1
            self.model.add(self.tools[0](code.group(1)))

    def cleanup(self):
        pass
""",
    "strands_sglang/__init__.py": """
import aiohttp
from types import SimpleNamespace

def get_client_from_slime_args(args, timeout):
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"

class ToolLimiter:
    def __init__(self, max_tool_iters):
        self.tool_iter_count = self.tool_call_count = 0

class SGLangModel:
    def __init__(self, tokenizer, client, tool_parser, sampling_params):
        self.tokenizer, self.client, self.params = tokenizer, client, sampling_params

    async def start(self, text):
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        self.rollout = SimpleNamespace(
            initial_prompt_length=len(ids), token_ids=ids, loss_mask=[0] * len(ids), logprobs=[None] * len(ids))

    def note(self, ids, mask, logprobs):
        self.rollout.token_ids += ids
        self.rollout.loss_mask += [mask] * len(ids)
        self.rollout.logprobs += logprobs

    def add(self, text):
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        self.note(ids, 0, [0.0] * len(ids))

    async def turn(self):
        payload = {"input_ids": self.rollout.token_ids, "sampling_params": self.params, "return_logprob": True}
        async with aiohttp.ClientSession() as session, session.post(self.client, json=payload) as response:
            response.raise_for_status()
            answer = await response.json()
        entries = answer["meta_info"]["output_token_logprobs"]
        self.note([entry[1] for entry in entries], 1, [entry[0] for entry in entries])
        return answer["text"]

    def reset(self):
        pass
""",
    "strands_sglang/tool_parsers.py": "class HermesToolParser:\n    pass\n",
}
IFBENCH = {
    "evaluation_lib.py": """
from collections import namedtuple

InputExample = namedtuple("InputExample", "key instruction_id_list prompt kwargs")
Found = namedtuple("Found", "follow_all_instructions")

def test_instruction_following_strict(asked, responses):
    return Found("," not in responses[asked.prompt])
"""
}
QWEN_VL_UTILS = {
    "qwen_vl_utils.py": """
def process_vision_info(messages):
    parts = [part for message in messages for part in message["content"]]
    return [part["image"] for part in parts if part["type"] == "image"] or None, None
"""
}
WANDB = {"wandb.py": "run = None\n\ndef log(*args, **kwargs):\n    pass\n"}


def write_packages(folder: Path, files: dict[str, str]) -> None:
    """Write stand-ins for packages, for PYTHONPATH."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.lstrip("\n"), encoding="utf-8")
