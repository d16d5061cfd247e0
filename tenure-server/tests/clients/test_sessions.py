"""Client libraries get a memory: three turns, tool calls in the second, a question about the first.

The application sends only what is new, all of it, or the end of it; it names the session, or does
not. Whatever it does, the session has each message once, the model is shown all of it, and nothing
is discarded.
"""

import contextlib
import uuid

import pytest

from cases import cases
from conversation import Conversation
from drivers import CLIENTS
from transcript import HELLO, WEATHER, NAME_QUESTION, NAME_QUESTION_AGAIN

OPENAI_PYTHON = CLIENTS[0]


@pytest.fixture
def conversation(tenure, stub):
    """Creates a conversation, which ends with the test."""
    with contextlib.ExitStack() as stack:

        def make(session_id):
            created = Conversation(tenure, stub, session_id)
            stack.callback(created.close)
            return created

        yield make


def new_session_id() -> str:
    return f"trip-{uuid.uuid4()}"


@cases("append", "full", "window")
def test_with_a_session_id(conversation, client, style, stream):
    dialogue = conversation(new_session_id())
    dialogue.ask_all(dialogue.join(client, style, stream), HELLO, WEATHER, NAME_QUESTION)
    dialogue.check()


@cases("full")
def test_without_a_session_id(conversation, client, style, stream):
    dialogue = conversation(None)
    dialogue.ask_all(dialogue.join(client, style, stream), HELLO, WEATHER, NAME_QUESTION)
    dialogue.check()


@pytest.mark.parametrize("begins", ["begins", "follows"])
@cases("append", "full", clients=[client for client in CLIENTS if not client.handoff])
def test_two_clients_take_turns(conversation, client, style, stream, begins):
    """The other client is openai-python, in the other style. Neither sends the other's turns."""
    dialogue = conversation(new_session_id())
    this = dialogue.join(client, style, stream)
    other = dialogue.join(OPENAI_PYTHON, "append" if style == "full" else "full", stream)
    first, second = (this, other) if begins == "begins" else (other, this)
    dialogue.ask(first, HELLO)
    dialogue.ask(second, WEATHER)
    dialogue.ask(first, NAME_QUESTION)
    dialogue.ask(second, NAME_QUESTION_AGAIN)
    dialogue.check()


@cases("append", "full", clients=[client for client in CLIENTS if client.handoff])
def test_a_handoff_changes_the_system_prompt(conversation, client, style, stream):
    dialogue = conversation(new_session_id())
    dialogue.ask_all(dialogue.join(client, style, stream), HELLO, WEATHER, NAME_QUESTION)
    prompts = [
        [message["content"] for message in request.messages if message["role"] == "system"]
        for request in dialogue.requests
    ]
    triage, weather = ["You hand questions over."], ["You know the weather."]
    assert prompts == [triage, triage, weather, weather, weather, triage]
