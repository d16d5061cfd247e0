"""Messages as flat lines, and what the lines of a scripted conversation must be.

A line is `user: TEXT`, `assistant: TEXT`, `calls NAME#ID …` or `tool ID: TEXT`, with the last five
characters of an id. System messages are left out: they are settings, not part of a conversation.
"""

from stub import FORECAST, GREETING, ModelRequest, text_of

HELLO = "hello, I am Zoe"
WEATHER = "what is the weather?"
NAME_QUESTION = "who am I?"
NAME_QUESTION_AGAIN = "once more: who am I?"


def short(call_id: str) -> str:
    return call_id[-5:]


def line(message: dict) -> str:
    """One message as a line."""
    text = text_of(message)
    if message["role"] == "tool":
        return f"tool {short(message['tool_call_id'])}: {text}"
    if calls := message.get("tool_calls"):
        calls_text = " ".join(f"{call['function']['name']}#{short(call['id'])}" for call in calls)
        return f"calls {calls_text}" + (f": {text}" if text else "")
    return f"{message['role']}: {text}"


def lines(messages: list[dict]) -> list[str]:
    """The messages as lines, without system messages."""
    return [line(message) for message in messages if message["role"] not in ("system", "developer")]


def call_ids(requests: list[ModelRequest]) -> list[str]:
    """The ids of all calls that the model made, in order."""
    return [
        short(call["id"]) for request in requests for call in request.answer.get("tool_calls", [])
    ]


def expected(questions: list[str], ids: list[str], handoff: str | None = None) -> list[str]:
    """The conversation that these questions lead to, if the model is always shown all of it.

    `ids` are the ids of the calls that the model made; `handoff` is the name of the agent that
    another one hands the question about the weather over to.
    """
    given = iter(ids + ["?????"] * 4)
    result = []
    for question in questions:
        result.append(f"user: {question}")
        if question == HELLO:
            result.append(f"assistant: {GREETING}")
        elif question == WEATHER:
            result += tool_rounds(given, handoff) + [f"assistant: {FORECAST}"]
        else:
            result.append("assistant: You are Zoe.")
    return result


def tool_rounds(given, handoff: str | None) -> list[str]:
    result = []
    if handoff:
        transfer = next(given)
        result.append(f"calls transfer_to_{handoff}#{transfer}")
        result.append(f'tool {transfer}: {{"assistant": "{handoff}"}}')
    locate, today, tomorrow = next(given), next(given), next(given)
    return result + [
        f"calls locate#{locate}",
        f"tool {locate}: Bern",
        f"calls forecast#{today} forecast#{tomorrow}",
        f"tool {today}: rain today",
        f"tool {tomorrow}: sun tomorrow",
    ]


def shown_before_each_answer(conversation: list[str]) -> list[list[str]]:
    """What the model must be shown in each request: all that precedes its answer."""
    return [
        conversation[:position]
        for position, text in enumerate(conversation)
        if text.startswith(("assistant: ", "calls "))
    ]
