"""LangGraph: `create_agent`, with a checkpointer (full) and without one (append)."""

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver

from drivers.tools import forecast, locate


class LangGraphAgent:
    """The session id is a field of the body: `ChatOpenAI(extra_body={"session_id": …})`."""

    def __init__(self, base_url, session_id=None, user="default", style="append", stream=False):
        model = ChatOpenAI(
            model="default",
            base_url=base_url,
            api_key="none",
            default_headers={"X-Tenure-User": user},
            extra_body={"session_id": session_id} if session_id else None,
        )
        self.agent = create_agent(
            model,
            tools=[locate, forecast],
            system_prompt="You know the weather.",
            checkpointer=InMemorySaver() if style == "full" else None,
        )
        self.config = {"configurable": {"thread_id": "1"}}
        self.stream = stream

    def ask(self, text):
        question = {"messages": [{"role": "user", "content": text}]}
        if not self.stream:
            return self.agent.invoke(question, self.config)["messages"][-1].text
        # "messages" makes LangGraph stream the model's tokens, "values" has the result.
        modes = ["messages", "values"]
        for mode, value in self.agent.stream(question, self.config, stream_mode=modes):
            if mode == "values":
                state = value
        return state["messages"][-1].text

    def close(self):
        pass
