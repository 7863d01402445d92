"""The least of packages that examples of miles import, written anew from how the examples call them."""

from from_slime_stubs import STRANDS as STRANDS_OF_SLIME

# miles asks for another version of the package: the same turns under other names.
STRANDS = {
    "strands/__init__.py": STRANDS_OF_SLIME["strands/__init__.py"]
    .replace("self.hooks[0].tool_iter_count += 1\n", "self.hooks[0].iteration_count += 1\n")
    .replace(
        "self.hooks[0].tool_call_count += 1\n", 'self.messages.append({"role": "tool", "content": code.group(1)})\n'
    )
    .replace("self.system_prompt = model,", "self.system_prompt, self.messages = model,")
    .replace("hooks, system_prompt\n", "hooks, system_prompt, []\n"),
    "strands_sglang/__init__.py": STRANDS_OF_SLIME["strands_sglang/__init__.py"]
    + """
class SGLangClient:
    @staticmethod
    def from_miles_args(args):
        return get_client_from_slime_args(args, None)

class SGLangModel(SGLangModel):
    def __init__(self, tokenizer, client, model_id, params):
        super().__init__(tokenizer, client, None, params)

    def format_request_messages(self, messages, system_prompt):
        return messages

    @property
    def token_manager(self):
        made = self.rollout
        made.segments = [made.token_ids[:made.initial_prompt_length]]
        return made
""",
    "strands_sglang/tool_limiter.py": """
class ToolIterationLimiter:
    def __init__(self, max_iterations):
        self.iteration_count = 0
""",
    "camel/__init__.py": "",
    "camel/interpreters.py": """
import subprocess, sys

class SubprocessInterpreter:
    def __init__(self, **settings):
        pass

    def run(self, code, language):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        return "result of the program: " + done.stdout
""",
}
TBENCH2 = {
    "tbench2_env.py": """
from types import SimpleNamespace

class Tbench2Action:
    def __init__(self, action_type, command=""):
        self.action_type, self.command = action_type, command

class Tbench2Env:
    def __init__(self, base_url, message_timeout_s):
        self.commands = []

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    async def reset(self, task_id=None):
        return SimpleNamespace(observation=SimpleNamespace(instruction="Find the number."))

    async def step(self, action):
        if action.action_type == "evaluate":
            seen = SimpleNamespace(error="", info={"harness": "tests/test.sh"})
            return SimpleNamespace(observation=seen, reward=float(any("7" in one for one in self.commands)))
        self.commands.append(action.command)
        return SimpleNamespace(observation=SimpleNamespace(output="ran it in the shell"))
"""
}
OMEGACONF = {
    "omegaconf.py": """
import yaml

class OmegaConf:
    create = staticmethod(lambda found: yaml.safe_load(found) if isinstance(found, str) else dict(found))
    structured = staticmethod(lambda kind: {})
    merge = staticmethod(lambda *parts: {key: value for part in parts for key, value in part.items()})
    to_object = staticmethod(dict)
    to_container = staticmethod(lambda found, resolve: found)
"""
}
