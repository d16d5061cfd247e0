"""pydantic-ai: `Agent.run` with tools, on chat completions."""

import asyncio

from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from drivers.tools import forecast, locate


class PydanticAI:
    """The session id is in the settings of a run:
    `agent.run(…, model_settings={"extra_body": {"session_id": …}})`.
    """

    def __init__(self, base_url, session_id=None, user="default", style="append", stream=False):
        headers = {"X-Tenure-User": user}
        self.client = AsyncOpenAI(base_url=base_url, api_key="none", default_headers=headers)
        self.agent = Agent(
            OpenAIChatModel("default", provider=OpenAIProvider(openai_client=self.client)),
            instructions="You know the weather.",
            tools=[locate, forecast],
        )
        self.settings = {"extra_body": {"session_id": session_id}} if session_id else None
        self.style = style
        self.stream = stream
        self.history = None
        # The connections of the client belong to one event loop, so all turns share it.
        self.loop = asyncio.Runner()

    def ask(self, text):
        return self.loop.run(self.run(text))

    async def run(self, text):
        options = {"message_history": self.history, "model_settings": self.settings}
        if self.stream:
            async with self.agent.run_stream(text, **options) as result:
                output = await result.get_output()
        else:
            result = await self.agent.run(text, **options)
            output = result.output
        if self.style == "full":
            self.history = result.all_messages()
        return output

    def close(self):
        self.loop.run(self.client.close())
        self.loop.close()
