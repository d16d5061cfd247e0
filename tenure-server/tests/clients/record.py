"""Records what client libraries send: each of them talks to the stub, without Tenure.

    python3 record.py DIRECTORY [CLIENT…]

One conversation is one JSON file: the requests in order, each with its answer and with the session
that must be stored after it.
"""

import argparse
import json
import pathlib

from drivers import CLIENTS, Client
from drivers.node import HOST
from stub import ModelRequest, Stub
from transcript import HELLO, WEATHER, NAME_QUESTION, line, lines

MAX_TEXT = 300
HISTORY = {
    "append": "only the new question",
    "full": "the whole history",
    "window": "the end of the history",
}


def record(stub: Stub, client: Client, style: str, stream: bool) -> dict:
    """One conversation of a client, as a trace."""
    driver = client.driver(stub.base_url, style=style, stream=stream)
    requests = []
    stored = []
    for number, question in enumerate((HELLO, WEATHER, NAME_QUESTION), start=1):
        before = len(stub.requests)
        driver.ask(question)
        for request in stub.requests[before:]:
            stored += lines(new_messages(request)) + [line(request.answer)]
            expected = expectation(request, style, number, stored)
            requests.append(recorded(request) | {"expected": expected})
    driver.close()
    return {
        "client": client.name,
        "version": client.version(),
        "scenario": f"{client.scenario}, {HISTORY[style]}, {'stream' if stream else 'plain'}",
        "style": style,
        "notes": "",
        "requests": requests,
    }


def last_assistant(messages: list[dict]) -> int | None:
    """The position of the last assistant message."""
    positions = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return positions[-1] if positions else None


def new_messages(request: ModelRequest) -> list[dict]:
    """What the session does not have yet: everything after the last assistant message."""
    last = last_assistant(request.messages)
    return request.messages if last is None else request.messages[last + 1 :]


def expectation(request: ModelRequest, style: str, turn: int, stored: list[str]) -> dict:
    """What the request means, and the session after it."""
    is_question = request.messages[-1]["role"] == "user"
    has_history = last_assistant(request.messages) is not None
    question_meaning = style if has_history else "append"
    meaning = question_meaning if is_question else "tool_loop"
    result = {"meaning": meaning, "stored_after": list(stored)}
    # Without an id, nothing connects a question that is sent alone with the turns before it.
    result["without_id"] = f"t{turn}" if style == "append" else "main"
    if turn > 1 and not has_history:
        result["without_id_new_is_fine"] = True
    return result


def recorded(request: ModelRequest) -> dict:
    """The request as it was sent, and its answer. Fields with their usual value are left out."""
    result = {"messages": [shortened(message) for message in request.messages]}
    result["tools"] = request.tools
    if request.stream:
        result["stream"] = True
    if request.retry_count:
        result["retry_count"] = request.retry_count
    result["answer"] = [request.answer]
    return result


def shortened(message: dict) -> dict:
    content = message.get("content")
    if isinstance(content, str) and len(content) > MAX_TEXT:
        return message | {"content": content[:MAX_TEXT]}
    return message


def file_name(client: Client, style: str, stream: bool) -> str:
    name = client.name.replace("-", "_")
    return f"{name}_{'stream' if stream else 'plain'}_{style}.json"


def record_all(directory: pathlib.Path, clients: list[Client]) -> list[pathlib.Path]:
    """Writes one file per client, style and way of transport."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    with Stub() as stub:
        for client in clients:
            for style in client.styles:
                for stream in (False, True):
                    trace = record(stub, client, style, stream)
                    path = directory / file_name(client, style, stream)
                    path.write_text(json.dumps(trace, indent=1, ensure_ascii=False) + "\n")
                    written.append(path)
    return written


def main():
    names = {client.name: client for client in CLIENTS}
    parser = argparse.ArgumentParser(description="Records what client libraries send.")
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("client", nargs="*", help=f"default: all of {', '.join(names)}")
    arguments = parser.parse_args()
    if unknown := set(arguments.client) - set(names):
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    clients = [names[name] for name in arguments.client] or list(CLIENTS)
    for path in record_all(arguments.directory, clients):
        print(path)
    HOST.close()


if __name__ == "__main__":
    main()
