"""What pages of other sites may do: tried in a real browser, which enforces CORS as users' browsers do."""

import pathlib

import httpx
import pytest

from browser import CHROMIUM, web_server, visit
from cases import skip_unless_ci
from server import Tenure

# The script reports what it saw, or why it failed, to the server that it came from.
PAGE = """<!doctype html><title>test</title><script type="module">
const report = (value) => fetch("/report", {method: "POST", body: JSON.stringify(value)});
try { report(await (async () => {@SCRIPT@})()); } catch (e) { report({failed: String(e)}); }
</script>"""

OPENAI_CLIENT = """
const {default: OpenAI} = await import("/openai/index.mjs");
const client = new OpenAI({
  baseURL: "@SERVER@/v1", apiKey: "none", dangerouslyAllowBrowser: true, maxRetries: 0,
});
const messages = [{role: "user", content: "hello, I am Zoe"}];
const {data, response} = await client.chat.completions
  .create({model: "default", messages, session_id: "browser"}).withResponse();
const stream = await client.chat.completions.create({
  model: "default", messages: [{role: "user", content: "who am I?"}], session_id: "browser", stream: true,
});
let streamed = "";
for await (const chunk of stream) streamed += chunk.choices[0]?.delta?.content ?? "";
return {
  answer: data.choices[0].message.content, streamed,
  session: response.headers.get("x-session-id"), request: response.headers.get("x-request-id"),
};
"""

HOSTILE = """
const results = {};
const read = await fetch("@SERVER@/sessions").then((r) => r.status, (e) => "blocked");
const json = await fetch("@SERVER@/sessions", {
  method: "POST", headers: {"Content-Type": "application/json"}, body: '{"id": "planted"}',
}).then((r) => r.status, (e) => "blocked");
// Without a body and without a preflight request: the browser sends it, and hides the response.
for (const path of ["/sessions", "/sessions/gone/restore", "/sessions/gone/uncompact"]) {
  await fetch(`@SERVER@${path}`, {method: "POST", mode: "no-cors"}).catch(() => null);
}
return {read, json};
"""


@pytest.fixture
def chromium():
    if not CHROMIUM:
        skip_unless_ci("no Chromium: run this with scripts/with-chromium.sh")


def start(tmp_path: pathlib.Path, origin: str, model_url: str) -> Tenure:
    tenure = Tenure(tmp_path, f"sqlite:{tmp_path}/tenure.db", model_url)
    with (tmp_path / "tenure.yaml").open("a") as config:
        config.write(f"cors: {{origins: ['{origin}']}}\n")
    tenure.start()
    return tenure


def page(script: str, url: str) -> str:
    return PAGE.replace("@SCRIPT@", script.replace("@SERVER@", url))


def test_openai_browser_client_works_from_a_configured_origin(chromium, stub, tmp_path):
    with web_server() as (server, reports):
        origin = f"http://localhost:{server.server_port}"
        tenure = start(tmp_path, origin, stub.base_url)
        try:
            server.RequestHandlerClass.keywords["page"] = page(OPENAI_CLIENT, tenure.url)
            seen = visit(origin, reports)
        finally:
            tenure.stop()
    assert seen.get("failed") is None, seen
    assert seen["session"] == "browser" and seen["request"]
    assert seen["answer"].startswith("Hello") and "Zoe" in seen["streamed"]


def test_pages_of_other_sites_neither_read_nor_change_anything(chromium, stub, tmp_path):
    with web_server() as (server, reports):
        # Another host name than the server's: another site.
        origin = f"http://localhost:{server.server_port}"
        tenure = start(tmp_path, "https://app.example.com", stub.base_url)
        try:
            httpx.post(f"{tenure.url}/sessions", json={"id": "gone"}).raise_for_status()
            httpx.delete(f"{tenure.url}/sessions/gone").raise_for_status()
            server.RequestHandlerClass.keywords["page"] = page(HOSTILE, tenure.url)
            seen = visit(origin, reports)
            listed = httpx.get(f"{tenure.url}/sessions?status=active,paused,deleted").json()["data"]
        finally:
            tenure.stop()
    assert seen == {"read": "blocked", "json": "blocked"}
    assert [(session["id"], session["status"]) for session in listed] == [("gone", "deleted")]
