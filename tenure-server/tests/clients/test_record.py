"""The recorder, and what the tests of sessions rest on: what a client sends without a server."""

import json

import pytest

from cases import available, cases
from drivers import CLIENTS
from record import file_name, record_all
from transcript import HELLO, WEATHER, NAME_QUESTION, expected, lines, short


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The recordings of all clients."""
    directory = tmp_path_factory.mktemp("traces")
    record_all(directory, list(filter(available, CLIENTS)))
    return directory


@pytest.fixture
def trace(directory, client, style, stream):
    return json.loads((directory / file_name(client, style, stream)).read_text())


def recorded_ids(trace: dict) -> list[str]:
    return [
        short(call["id"])
        for request in trace["requests"]
        for call in request["answer"][0].get("tool_calls", [])
    ]


@cases("append", "full", "window")
def test_a_trace_has_the_whole_conversation(trace, client, style, stream):
    conversation = expected([HELLO, WEATHER, NAME_QUESTION], recorded_ids(trace), client.handoff)
    if style != "full":
        # Without a server, the third request has nothing of the first turn.
        conversation[-1] = "assistant: I do not know."
    requests = trace["requests"]
    assert requests[-1]["expected"]["stored_after"] == conversation
    assert [request.get("stream", False) for request in requests] == [stream] * len(requests)


@cases("append", "full", "window")
def test_the_last_request_has_what_its_style_says(trace, client, style, stream):
    before = trace["requests"][-1]["expected"]["stored_after"][:-1]
    wanted = {"append": before[-1:], "full": before, "window": before[2:]}[style]
    assert lines(trace["requests"][-1]["messages"]) == wanted
