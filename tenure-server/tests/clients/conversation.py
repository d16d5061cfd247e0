"""A conversation with the server, and the check that nothing of it is lost, repeated or truncated."""

import time
import uuid

from relay import Relay
from server import Tenure
from stub import Stub
from transcript import call_ids, expected, lines, shown_before_each_answer

ANSWERED_SECONDS = 5


class Conversation:
    """One session of one user, with one client or several.

    Sessions are matched by content among those of one user, so each conversation has its own.
    """

    def __init__(self, tenure: Tenure, stub: Stub, session_id: str | None):
        self.tenure = tenure
        self.stub = stub
        self.session_id = session_id
        self.user = f"user-{uuid.uuid4()}"
        self.relay = Relay("127.0.0.1", tenure.port)
        self.drivers = []
        self.handoff = None
        self.questions = []
        self.answers = []
        self.requests = []

    def join(self, client, style: str, stream: bool):
        """A driver of this client that takes part in the conversation."""
        driver = client.driver(self.relay.base_url, self.session_id, self.user, style, stream)
        self.drivers.append(driver)
        self.handoff = client.handoff
        return driver

    def ask(self, driver, question: str):
        """One turn. Conversations take turns one at a time, so all requests in it are its own."""
        before = len(self.stub.requests)
        self.questions.append(question)
        try:
            self.answers.append(driver.ask(question))
        finally:
            self.requests += self.stub.requests[before:]

    def ask_all(self, driver, *questions: str):
        for question in questions:
            self.ask(driver, question)

    def close(self):
        for driver in self.drivers:
            driver.close()
        self.relay.close()

    def check(self):
        """Fails unless the conversation is stored and was shown whole, once and in order."""
        wanted = self.wanted()
        found = self.found()
        if found != wanted:
            raise AssertionError(difference(found, wanted))

    def wanted(self) -> dict:
        conversation = expected(self.questions, call_ids(self.requests), self.handoff)
        shown = shown_before_each_answer(conversation)
        return {
            "sessions": [self.session_id or "found by content"],
            "stored": [conversation],
            "discarded": [[]],
            "shown": shown,
            "rewound": [0] * len(shown),
            "last answer": "You are Zoe.",
        }

    def found(self) -> dict:
        sessions = self.stored_sessions()
        return {
            "sessions": [
                session["id"] if self.session_id else "found by content" for session in sessions
            ],
            "stored": [stored_lines(session) for session in sessions],
            "discarded": [discarded_lines(session) for session in sessions],
            "shown": [lines(request.messages) for request in self.requests],
            "rewound": [report["rewound"] for report in self.relay.reports()],
            "last answer": self.answers[-1] if self.answers else None,
        }

    def stored_sessions(self) -> list[dict]:
        """The user's sessions, once each ends with an answer.

        A client may return at the last token of a stream, before the answer is durable.
        """
        deadline = time.monotonic() + ANSWERED_SECONDS
        while True:
            sessions = self.tenure.sessions(self.user)
            if all(map(is_answered, sessions)) or time.monotonic() > deadline:
                return sessions
            time.sleep(0.05)


def is_answered(session: dict) -> bool:
    last = stored_lines(session)[-1:]
    return bool(last) and last[0].startswith("assistant: ")


def stored_lines(session: dict) -> list[str]:
    return lines([stored["message"] for stored in session["messages"]])


def discarded_lines(session: dict) -> list[list[str]]:
    """One list per rewind."""
    return [stored_lines(discarded) for discarded in session["discarded"]]


def difference(found: dict, wanted: dict) -> str:
    """What differs, then all that was stored and shown, for people."""
    differing = [key for key in wanted if found[key] != wanted[key]]
    text = [f"not as expected: {', '.join(differing)}", ""]
    for key in ("sessions", "discarded", "rewound", "last answer"):
        text.append(f"{key}: {found[key]}")
        if key in differing:
            text.append(f"  expected: {wanted[key]}")
    for session_id, stored in zip(found["sessions"], found["stored"], strict=True):
        text += ["", f"stored in session {session_id}:", *indent(stored)]
    if "stored" in differing:
        text += ["", "expected:", *indent(wanted["stored"][0])]
    for number, shown in enumerate(found["shown"]):
        whole = number < len(wanted["shown"]) and shown == wanted["shown"][number]
        text += ["", f"shown in request {number + 1}: {'all' if whole else 'NOT AS EXPECTED'}"]
        text += [] if whole else indent(shown)
    return "\n".join(text)


def indent(texts: list[str]) -> list[str]:
    return [f"    {text}" for text in texts]
