"""Agents behind OpenAI- and Anthropic-compatible endpoints: a proxy before the engines records what they ask.

    --custom-generate-function-path fusionrl.rollout.sessions.generate --agent-path my_agent.py:agent

Each sample has a session, with an address and a key of its own. Tokens in, tokens out: the turns of a conversation are
kept as they were sampled, with log-probs and weight versions; what the agent says between them is rendered by the chat
template with mask 0. docs/guides/agents.md has an example.
"""

from fusionrl.rollout.sessions.generate import generate
from fusionrl.rollout.sessions.session import Session, open_session

__all__ = ["Session", "generate", "open_session"]
