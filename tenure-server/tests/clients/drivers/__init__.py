"""The clients: each is a class with one conversation per object.

A client is made with `base_url, session_id, user, style, stream`. `ask(text)` is one turn, with as
many requests as the tool calls of the model need, and returns the text of the answer. Styles:

- `append`: between turns the application keeps nothing and sends only the new question. Within a
  turn the tool loop sends its own list: the question, the calls, their results.
- `full`: the application keeps the whole conversation and sends it with each request.
- `window`: the application sends the end of the conversation.
"""

import json
import os
from dataclasses import dataclass
from importlib.metadata import version

# No library sends traces to its maker, or downloads a list of prices; read when they are imported.
os.environ.update(
    LANGCHAIN_TRACING_V2="false",
    LANGSMITH_TRACING="false",
    LITELLM_LOCAL_MODEL_COST_MAP="True",
)

from drivers.langchain_trim import LangChainTrim  # noqa: E402
from drivers.langgraph_agent import LangGraphAgent  # noqa: E402
from drivers.litellm_completion import LiteLLM  # noqa: E402
from drivers.node import OpenAINode, VercelAI, modules_directory  # noqa: E402
from drivers.openai_agents import OpenAIAgents, OpenAIAgentsHandoff  # noqa: E402
from drivers.openai_python import OpenAIPython  # noqa: E402
from drivers.pydantic_ai_agent import PydanticAI  # noqa: E402


@dataclass(frozen=True)
class Client:
    """A client library, as tests and recordings name it."""

    name: str
    driver: type
    packages: tuple[str, ...]
    scenario: str
    styles: tuple[str, ...] = ("append", "full")
    # The agent that the question about the weather is handed over to.
    handoff: str | None = None

    @property
    def in_node(self) -> bool:
        return self.driver in (OpenAINode, VercelAI)

    def version(self) -> str:
        find = node_version if self.in_node else version
        if len(self.packages) == 1:
            return find(self.packages[0])
        return ", ".join(f"{package} {find(package)}" for package in self.packages)


def node_version(package: str) -> str:
    path = modules_directory() / "node_modules" / package / "package.json"
    return json.loads(path.read_text())["version"]


CLIENTS = (
    Client("openai-python", OpenAIPython, ("openai",), "tool loop by hand"),
    Client("openai-agents", OpenAIAgents, ("openai-agents",), "Runner.run with tools"),
    Client(
        "openai-agents-handoff",
        OpenAIAgentsHandoff,
        ("openai-agents",),
        "Runner.run with a handoff in the second turn: another system prompt",
        handoff="weather",
    ),
    Client(
        "langgraph",
        LangGraphAgent,
        ("langgraph", "langchain", "langchain-openai"),
        "create_agent, with InMemorySaver if the whole history is sent",
    ),
    Client(
        "langchain-trim",
        LangChainTrim,
        ("langchain", "langchain-openai"),
        "bind_tools loop by hand, trim_messages before each request",
        styles=("window",),
    ),
    Client("litellm", LiteLLM, ("litellm",), "tool loop by hand"),
    Client("pydantic-ai", PydanticAI, ("pydantic-ai-slim",), "Agent.run with tools"),
    Client("openai-node", OpenAINode, ("openai",), "runTools"),
    Client(
        "vercel-ai",
        VercelAI,
        ("ai", "@ai-sdk/openai-compatible"),
        "generateText or streamText with several steps",
    ),
)
