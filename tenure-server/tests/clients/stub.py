"""A model server that answers by script and records what it is shown.

It speaks OpenAI's chat completions, streamed and not. The answer depends only on the messages in
the request, so a model that is not shown something can not know it: that is what the tests ask.
"""

import json
import re
import threading
import uuid
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

GREETING = "Hello! How can I help?"
FORECAST = "Today there is rain in Bern, tomorrow sun."
UNKNOWN = "I do not know."


@dataclass
class ModelRequest:
    """One request that the model was sent, and its answer."""

    messages: list[dict]
    tools: list[str]
    stream: bool
    retry_count: int
    answer: dict


def text_of(message: dict) -> str:
    """The text of a message, whether its content is a string or a list of parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def answer_to(messages: list[dict], tools: list[str]) -> dict:
    """The assistant message that the script gives for these messages."""
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=None)
    question = "" if last is None else text_of(messages[last]).lower()
    if "weather" in question:
        return weather(messages[last + 1 :], tools)
    if "who am i" in question:
        return text_answer(name_in(messages))
    return text_answer(GREETING)


def weather(since_question: list[dict], tools: list[str]) -> dict:
    """Two rounds of tool calls, then an answer; before them a handoff, if one is offered."""
    handoffs = [name for name in tools if name.startswith("transfer_to_")]
    if handoffs:
        return call((handoffs[0], {}))
    answered = {m["tool_call_id"] for m in since_question if m["role"] == "tool"}
    done = {
        tool_call["function"]["name"]
        for message in since_question
        for tool_call in message.get("tool_calls") or []
        if tool_call["id"] in answered
    }
    if "locate" not in done:
        return call(("locate", {"person": "me"}))
    if "forecast" not in done:
        return call(("forecast", {"day": "today"}), ("forecast", {"day": "tomorrow"}))
    return text_answer(FORECAST)


def name_in(messages: list[dict]) -> str:
    """The user's name, if a message contains it."""
    for message in messages:
        found = re.search(r"\bI am (\w+)", text_of(message))
        if message["role"] == "user" and found:
            return f"You are {found[1]}."
    return UNKNOWN


def text_answer(text: str) -> dict:
    return {"role": "assistant", "content": text}


def call(*calls: tuple[str, dict]) -> dict:
    """An assistant message with tool calls. Ids are unique, as those of real servers are."""
    tool_calls = [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for name, arguments in calls
    ]
    return {"role": "assistant", "content": None, "tool_calls": tool_calls}


def deltas(message: dict) -> list[dict]:
    """The message in pieces, as a stream has them."""
    text = message["content"]
    pieces = [{"role": "assistant", "content": "" if text else None}]
    pieces += [{"content": word} for word in re.findall(r"\S+\s*", text or "")]
    for index, tool_call in enumerate(message.get("tool_calls", [])):
        function = tool_call["function"]
        opening = {**tool_call, "function": {"name": function["name"], "arguments": ""}}
        pieces.append({"tool_calls": [{"index": index, **opening}]})
        rest = {"index": index, "function": {"arguments": function["arguments"]}}
        pieces.append({"tool_calls": [rest]})
    return pieces


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Otherwise the second write of a response waits for the acknowledgement of the first: 40 ms.
    disable_nagle_algorithm = True

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            self.send_error(404)
            return
        tools = [tool["function"]["name"] for tool in body.get("tools") or []]
        answer = answer_to(body["messages"], tools)
        retry_count = int(self.headers.get("x-stainless-retry-count", 0))
        stream = body.get("stream", False)
        request = ModelRequest(body["messages"], tools, stream, retry_count, answer)
        self.server.requests.append(request)
        if stream:
            options = body.get("stream_options") or {}
            self.send_stream(answer, options.get("include_usage", False))
        else:
            self.send_whole(answer)

    def send_whole(self, answer: dict):
        choice = {"index": 0, "message": answer, "finish_reason": finish_reason(answer)}
        body = json.dumps({**envelope("chat.completion"), "choices": [choice], "usage": USAGE})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def send_stream(self, answer: dict, include_usage: bool):
        head = envelope("chat.completion.chunk")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        # Without a length, the end of the connection is the end of the body.
        self.send_header("Connection", "close")
        self.end_headers()
        for delta in deltas(answer):
            self.send_event({**head, "choices": [choice_of(delta, None)]})
        self.send_event({**head, "choices": [choice_of({}, finish_reason(answer))]})
        if include_usage:
            self.send_event({**head, "choices": [], "usage": USAGE})
        self.wfile.write(b"data: [DONE]\n\n")

    def send_event(self, chunk: dict):
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    def log_message(self, *_):
        pass


USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}


def envelope(kind: str) -> dict:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": 0, "model": "default"}


def choice_of(delta: dict, reason: str | None) -> dict:
    return {"index": 0, "delta": delta, "finish_reason": reason}


def finish_reason(answer: dict) -> str:
    return "tool_calls" if answer.get("tool_calls") else "stop"


class Stub:
    """The server, in a thread of this process. `requests` has everything that it was sent."""

    def __init__(self):
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.requests = []
        self.base_url = f"http://127.0.0.1:{self.server.server_port}/v1"

    @property
    def requests(self) -> list[ModelRequest]:
        return self.server.requests

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
