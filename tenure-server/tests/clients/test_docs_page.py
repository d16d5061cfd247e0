"""The page /docs in a real browser: requests are sent from its forms, and only to its own server."""

import json
import subprocess

import httpx
import pytest

from browser import CHROMIUM, browser
from cases import skip_unless_ci
from server import BINARY, running_server

# Fills the form of an operation, sends it, and waits for the response that is shown.
SEND = """(async () => {
  document.querySelector("#key").value = %(key)s;
  const form = document.querySelector("details#%(operation)s form");
  for (const [name, value] of Object.entries(%(fields)s)) form.querySelector(`[name="${name}"]`).value = value;
  form.querySelector("button[type=submit]").click();
  for (;;) {
    await new Promise((done) => setTimeout(done, 20));
    if (!form.querySelector("button[type=submit]").disabled) return form.querySelector(".result").textContent;
  }
})()"""

# What the policy of the page blocks.
BLOCKED = """new Promise((done) => {
  addEventListener("securitypolicyviolation", (event) => done(event.effectiveDirective));
  fetch("http://localhost:1/").catch(() => null);
})"""


@pytest.fixture
def chromium():
    if not CHROMIUM:
        skip_unless_ci("no Chromium: run this with scripts/with-chromium.sh")


def send(page, operation: str, key: str = "", **fields) -> str:
    values = {"key": json.dumps(key), "operation": operation, "fields": json.dumps(fields)}
    return page.evaluate(SEND % values)


def test_requests_are_sent_from_the_page(chromium, stub, tmp_path):
    store = f"sqlite:{tmp_path}/tenure.db"
    command = [BINARY, "--store", store, "keys", "add"]
    key = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()
    with running_server(tmp_path, store, stub.base_url) as tenure, browser() as page:
        page.open(f"{tenure.url}/docs")
        # Chat is the first operation, and open.
        assert page.evaluate("document.querySelector('details').id") == "chat"
        assert page.evaluate("document.querySelector('details').open")
        refused = send(page, "chat")
        assert refused.startswith("401") and "error" in refused, refused
        answered = send(page, "chat", key)
        assert answered.startswith("200") and '"session_id": "trip"' in answered, answered
        shown = send(page, "list_messages", key, id="trip", limit="1")
        assert shown.startswith("200") and "What is the fare?" in shown, shown
        headers = {"Authorization": f"Bearer {key}"}
        stored = httpx.get(f"{tenure.url}/sessions/trip", headers=headers).json()
        assert stored["message_count"] == 2
        missing = send(page, "get_session", key, id="no/such session")
        assert missing.startswith("4"), missing
        # The key is nowhere but in its field, and the page reaches no other server.
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        assert page.evaluate("document.documentElement.outerHTML.includes(document.querySelector('#key').value)") is False
        assert page.evaluate(BLOCKED) == "connect-src"


def test_the_address_names_an_operation(chromium, stub, tmp_path):
    with running_server(tmp_path, f"sqlite:{tmp_path}/tenure.db", stub.base_url) as tenure, browser() as page:
        page.open(f"{tenure.url}/docs#fork_session")
        assert page.wait_for("document.querySelector('details#fork_session').open")
