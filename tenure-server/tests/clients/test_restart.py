"""The server is killed between two turns, and the conversation continues with a new one."""

import uuid

import pytest

from cases import all_cases, available, cases
from conversation import Conversation
from drivers import CLIENTS
from server import running_server
from transcript import HELLO, WEATHER, NAME_QUESTION

STYLES = ("append", "full", "window")


class Attempt:
    """A conversation of one client. Its first error ends it, and is raised by `check`."""

    def __init__(self, conversation: Conversation, case: tuple):
        self.conversation = conversation
        self.case = case
        self.error = None

    def before_the_crash(self):
        self.driver = self.conversation.join(*self.case)
        self.conversation.ask_all(self.driver, HELLO, WEATHER)

    def after_the_crash(self):
        self.conversation.ask(self.driver, NAME_QUESTION)

    def run(self, step):
        """What goes wrong with one client must not hide how the others do."""
        if self.error is None:
            try:
                step()
            except Exception as error:
                self.error = error

    def check(self):
        if self.error:
            raise self.error
        self.conversation.check()


@pytest.fixture(scope="module")
def attempts(new_store, stub, tmp_path_factory):
    """All clients in all styles: two turns, one crash for all of them, the third turn."""
    directory = tmp_path_factory.mktemp("restarted")
    with running_server(directory, new_store(directory), stub.base_url) as tenure:
        attempts = {
            case: Attempt(Conversation(tenure, stub, f"trip-{uuid.uuid4()}"), case)
            for case in all_cases(*STYLES, clients=filter(available, CLIENTS)).values()
        }
        for attempt in attempts.values():
            attempt.run(attempt.before_the_crash)
        tenure.kill()
        tenure.start()
        for attempt in attempts.values():
            attempt.run(attempt.after_the_crash)
        yield attempts
        for attempt in attempts.values():
            attempt.conversation.close()


@cases(*STYLES)
def test_a_restart_between_turns(attempts, client, style, stream):
    attempts[client, style, stream].check()
