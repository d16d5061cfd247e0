"""openai-agents: `Runner.run` with tools, on chat completions; also with a handoff."""

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from drivers.tools import forecast, locate

set_tracing_disabled(True)


class OpenAIAgents:
    """The session id is in the settings of a run, so it holds for all agents that take part:
    `RunConfig(model_settings=ModelSettings(extra_body={"session_id": …}))`.
    """

    def __init__(self, base_url, session_id=None, user="default", style="append", stream=False):
        headers = {"X-Tenure-User": user}
        self.client = AsyncOpenAI(base_url=base_url, api_key="none", default_headers=headers)
        model = OpenAIChatCompletionsModel(model="default", openai_client=self.client)
        settings = ModelSettings(extra_body={"session_id": session_id} if session_id else None)
        self.agent = self.make_agent(model)
        self.config = RunConfig(model_settings=settings)
        self.style = style
        self.stream = stream
        self.history = []
        # The connections of the client belong to one event loop, so all turns share it.
        self.loop = asyncio.Runner()

    def make_agent(self, model):
        return Agent(
            name="weather",
            instructions="You know the weather.",
            model=model,
            tools=[function_tool(locate), function_tool(forecast)],
        )

    def ask(self, text):
        result = self.loop.run(self.run([*self.history, {"role": "user", "content": text}]))
        if self.style == "full":
            self.history = result.to_input_list()
        return result.final_output

    async def run(self, messages):
        if not self.stream:
            return await Runner.run(self.agent, messages, run_config=self.config)
        result = Runner.run_streamed(self.agent, messages, run_config=self.config)
        async for _ in result.stream_events():
            pass
        return result

    def close(self):
        self.loop.run(self.client.close())
        self.loop.close()


class OpenAIAgentsHandoff(OpenAIAgents):
    """A triage agent without tools hands a question over to the agent that has them."""

    def make_agent(self, model):
        weather = super().make_agent(model)
        return Agent(
            name="triage",
            instructions="You hand questions over.",
            model=model,
            handoffs=[weather],
        )
