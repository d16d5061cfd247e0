"""OpenAI's Python client gets a memory: nothing but the address is changed."""

import asyncio
import base64
import json
import uuid

import openai
import pytest


@pytest.fixture
def session():
    return f"py-{uuid.uuid4()}"


def send(client, session, text, **more):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(
        model="rehearsal", messages=messages, extra_body={"session_id": session}, **more
    )


def test_chat(client, session):
    first = send(client, session, "Hello!")
    assert first.choices[0].message.content == "You said: Hello! I see 1 message."
    assert first.choices[0].finish_reason == "stop"
    assert first.usage.total_tokens > 0
    assert first.session_id == session
    second = send(client, session, "And now?")
    assert second.choices[0].message.content == "You said: And now? I see 3 messages."
    assert second.session["appended"] == 1


def test_the_whole_history_without_an_id(client):
    messages = [{"role": "user", "content": f"Hello from {uuid.uuid4()}"}]
    first = client.chat.completions.create(model="rehearsal", messages=messages)
    messages += [first.choices[0].message, {"role": "user", "content": "And now?"}]
    second = client.chat.completions.create(model="rehearsal", messages=messages)
    assert second.session_id == first.session_id
    assert second.session == {"matched": 2, "spliced": 0, "rewound": 0, "appended": 1, "ephemeral": 0}


def test_streaming(client, session):
    chunks = list(send(client, session, "One two three", stream=True, stream_options={"include_usage": True}))
    assert {chunk.session_id for chunk in chunks} == {session}
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "You said: One two three I see 1 message."
    assert len(chunks) > 5
    assert chunks[-1].usage.completion_tokens > 0
    assert send(client, session, "More").choices[0].message.content.endswith("I see 3 messages.")


def test_streaming_to_the_end_of_the_stream_helper(client, session):
    messages = [{"role": "user", "content": "One two"}]
    with client.chat.completions.stream(
        model="rehearsal", messages=messages, extra_body={"session_id": session}
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "You said: One two I see 1 message."


def test_async(base, session):
    async def stream_answer():
        client = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none")
        messages = [{"role": "user", "content": "Hello"}]
        stream = await client.chat.completions.create(
            model="rehearsal", messages=messages, stream=True, extra_body={"session_id": session}
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(stream_answer()) == "You said: Hello I see 1 message."


@pytest.mark.parametrize("stream", [False, True])
def test_tools(client, session, stream):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    response = send(client, session, 'CALL weather {"city": "Bern"}', tools=[tool], stream=stream)
    if stream:
        pieces = [chunk.choices[0].delta.tool_calls for chunk in response]
        (call,) = [call for calls in pieces if calls for call in calls]
    else:
        assert response.choices[0].finish_reason == "tool_calls"
        (call,) = response.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Bern"})
    # Only the result: the server knows the rest.
    messages = [{"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    answer = client.chat.completions.create(
        model="rehearsal", messages=messages, extra_body={"session_id": session}
    )
    assert answer.choices[0].message.content == "The tool said: rain I see 3 messages."


def test_pictures(client, session):
    data = base64.b64encode(bytes(range(256)) * 20).decode()
    parts = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
    ]
    ask = client.chat.completions.create
    first = ask(model="rehearsal", messages=[{"role": "user", "content": parts}], extra_body={"session_id": session})
    # Sent back without the picture, it is the same turn.
    history = [
        {"role": "user", "content": "What is this?"},
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Sure?"},
    ]
    second = ask(model="rehearsal", messages=history, extra_body={"session_id": session})
    assert second.session == {"matched": 2, "spliced": 0, "rewound": 0, "appended": 1, "ephemeral": 0}


def test_headers_and_idempotency(client, session):
    messages = [{"role": "user", "content": "Once"}]
    headers = {"X-Session-Id": session, "Idempotency-Key": session}
    ask = client.chat.completions.with_raw_response.create
    first = ask(model="rehearsal", messages=messages, extra_headers=headers)
    second = ask(model="rehearsal", messages=messages, extra_headers=headers)
    assert first.headers["X-Session-Id"] == second.headers["X-Session-Id"] == session
    assert first.parse().choices == second.parse().choices
    assert send(client, session, "More").choices[0].message.content.endswith("I see 3 messages.")
    with pytest.raises(openai.UnprocessableEntityError) as error:
        ask(model="rehearsal", messages=[{"role": "user", "content": "Twice"}], extra_headers=headers)
    assert error.value.code == "idempotency_key_reused"


def test_errors(client, session):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="rehearsal", messages=[])
    assert (error.value.code, error.value.param) == ("invalid", "messages")
    with pytest.raises(openai.BadRequestError) as error:
        send(client, "not an id\n", "Hello")
    assert error.value.code == "invalid"
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(
            model="rehearsal", messages=[{"role": "user", "content": "Hi"}], extra_body={"assistant_id": "nobody"}
        )
    assert error.value.code == "not_found"
    with pytest.raises(openai.NotFoundError):
        client.files.list()


def test_models(client):
    assert "rehearsal" in [model.id for model in client.models.list()]
