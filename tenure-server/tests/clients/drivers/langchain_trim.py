"""LangChain: `bind_tools` with a loop written by hand, and `trim_messages` before each request."""

from langchain_core.messages import HumanMessage, SystemMessage, trim_messages
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from drivers.tools import forecast, locate

TOOLS = {function.__name__: tool(function) for function in (locate, forecast)}


class LangChainTrim:
    """The session id is a field of the body: `ChatOpenAI(extra_body={"session_id": …})`.

    The client forgets what does not fit into its window; the server does not.
    """

    def __init__(self, base_url, session_id=None, user="default", style="window", stream=False):
        model = ChatOpenAI(
            model="default",
            base_url=base_url,
            api_key="none",
            default_headers={"X-Tenure-User": user},
            extra_body={"session_id": session_id} if session_id else None,
        )
        self.model = model.bind_tools(list(TOOLS.values()))
        self.stream = stream
        self.history = [SystemMessage("You know the weather.")]

    def ask(self, text):
        self.history.append(HumanMessage(text))
        while True:
            message = self.complete()
            self.history.append(message)
            if not message.tool_calls:
                return message.text
            for call in message.tool_calls:
                self.history.append(TOOLS[call["name"]].invoke(call))

    def complete(self):
        # With the system message: the whole second turn and the third question, without the first.
        window = trim_messages(
            self.history,
            max_tokens=9,
            token_counter=len,
            strategy="last",
            start_on="human",
            include_system=True,
        )
        if not self.stream:
            return self.model.invoke(window)
        chunks = list(self.model.stream(window))
        return sum(chunks[1:], chunks[0])

    def close(self):
        pass
