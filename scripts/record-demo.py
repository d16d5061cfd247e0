#!/usr/bin/env python3
"""Records docs/demo.svg: a run that survives `kill -9` of the server in the middle of a tool call.

    cargo build --release
    scripts/record-demo.py [target/release/tenure] [--output docs/demo.svg] [--port 18787]

The script really runs the scenario, on loopback, in a temporary directory: it starts a scripted
OpenAI-compatible model server and two HTTP tools (on PORT + 1), and types the commands of the
recording into one bash. Every line of the recording is a command as typed or output as received;
long ids and long lines are shortened with `…`, and the pauses of the animation are not measured.
The script fails, and writes nothing, unless the run continues, completes, and has called each tool
as often as promised (docs/tools.md). Needs Python 3.9, bash and curl 7.82 or later; no packages.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SESSION = "order-42"
COLUMNS = 95
TIMEOUT = 30


class Failure(Exception):
    """The scenario did not go as promised; the text says what was expected and what happened."""


# The model server and the tools ------------------------------------------------------------------


class ScriptedServices(BaseHTTPRequestHandler):
    """The model server (`/v1/chat/completions`) and the tools (`/charge_card`, `/ship_order`)."""

    protocol_version = "HTTP/1.1"
    directory = Path()
    shipments = {}

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/chat/completions":
            answer = json.dumps(completion(body["messages"]), separators=(",", ":"))
            self.respond(answer, "application/json")
        else:
            self.respond(self.call(self.path[1:]), "text/plain")

    def call(self, tool):
        """A tool call. Each one appends a line to calls.log, before it is answered."""
        key = self.headers["Idempotency-Key"]
        if tool == "charge_card":
            self.log(tool, key, "charged 42 EUR")
            return "charged 42 EUR"
        if key in self.shipments:
            self.log(tool, key, f"same key, same shipment: {self.shipments[key]}")
            return f"shipment {self.shipments[key]}"
        self.shipments[key] = f"S-{len(self.shipments) + 1}"
        self.log(tool, key, f"created shipment {self.shipments[key]}")
        # The carrier is slow: the first caller is killed before it gets an answer.
        threading.Event().wait()

    def log(self, tool, key, text):
        with open(self.directory / "calls.log", "a", encoding="utf-8") as file:
            file.write(f"{tool:<11} key={key}  {text}\n")

    def respond(self, text, kind):
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def completion(messages):
    """A model that charges, then ships, then reports what the tools returned."""
    results = [m["content"] for m in messages if m["role"] == "tool"]
    if len(results) < 2:
        name = ["charge_card", "ship_order"][len(results)]
        function = {"name": name, "arguments": '{"order":42}'}
        call = {"id": f"call_{len(results) + 1}", "function": function, "type": "function"}
        message, reason = {"role": "assistant", "tool_calls": [call]}, "tool_calls"
    else:
        message, reason = {"role": "assistant", "content": f"Done: {', '.join(results)}."}, "stop"
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "default",
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
    }


def configuration(port):
    tool = f"http://127.0.0.1:{port + 1}"
    return f"""\
listen: 127.0.0.1:{port}
models:
  - {{name: default, base_url: {tool}/v1}}
assistants:
  - name: shop
    tools:
      - http: {{name: charge_card, description: Charges a card., url: {tool}/charge_card}}
      - http: {{name: ship_order, idempotent: true, description: Ships it., url: {tool}/ship_order}}
"""


# The terminal ------------------------------------------------------------------------------------


class Terminal:
    """One bash. `type` runs a command in it, waits until it returns, and records both."""

    MARK = "\x1e"

    def __init__(self, directory, path):
        environment = {
            "PATH": f"{path}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(directory),
            "LANG": "C.UTF-8",
        }
        self.lines = []
        self.received = ""
        self.bash = subprocess.Popen(
            ["bash", "--norc", "--noprofile"],
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        threading.Thread(target=self.read, daemon=True).start()
        self.run("set -m")  # job control: `kill %1`

    def read(self):
        for line in self.bash.stdout:
            self.received += line

    def run(self, command):
        """Runs a command that is not part of the recording, and returns its output."""
        self.bash.stdin.write(f"{command}\nprintf '{self.MARK}%s\\n' $?\n")
        self.bash.stdin.flush()
        ending = re.compile(f"{self.MARK}(\\d+)\n")
        wait_for(lambda: ending.search(self.received), f"`{command}` to return")
        match = ending.search(self.received)
        output, self.received = self.received[: match.start()], self.received[match.end() :]
        if match[1] != "0":
            raise Failure(f"`{command}` returned {match[1]}:\n{output}")
        return output

    def type(self, command, until=None):
        """Types a command. `until` waits for what it does in the background."""
        first, *more = command.split("\n")
        self.lines += [("command", first), *(("more", x) for x in more)]
        output = self.run(command)
        if until:
            until()
            output += self.run("true")
        # Without bash's own notice of a job that was killed.
        output = [x for x in output.splitlines() if not x.startswith("bash: line ")]
        self.lines += [("output", x) for x in output]
        return output


def wait_for(condition, description):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise Failure(f"timed out after {TIMEOUT} s waiting for {description}")
        time.sleep(0.01)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def get(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return json.load(response) if "json" in response.headers["Content-Type"] else True
    except (urllib.error.URLError, ConnectionError):
        return None


# The scenario ------------------------------------------------------------------------------------


def scenario(directory, path, port):
    """Runs it, checks what happened, and returns the lines of the recording."""
    url = f"http://127.0.0.1:{port}"
    calls = directory / "calls.log"
    (directory / "tenure.yaml").write_text(configuration(port), encoding="utf-8")
    terminal = Terminal(directory, path)
    pids = []

    def called(tool):
        return calls.exists() and f"{tool} " in calls.read_text(encoding="utf-8")

    def is_ready():
        pids.append(int(terminal.run("echo $!")))
        wait_for(lambda: get(f"{url}/healthz") or not is_running(pids[-1]), f"the server at {url}")
        if not is_running(pids[-1]):
            raise Failure(f"the server did not start:\n{(directory / 'server.log').read_text()}")

    def is_completed():
        """Waits for the run that the killed server left behind."""
        is_ready()
        status = "missing"
        deadline = time.monotonic() + TIMEOUT
        while status != "completed":
            runs = get(f"{url}/sessions/{SESSION}/runs")
            status = runs["data"][0]["status"] if runs and runs["data"] else status
            if status in ("failed", "cancelled", "paused") or time.monotonic() > deadline:
                raise Failure(f"the run did not continue after the restart: it is {status}")
            time.sleep(0.01)

    try:
        terminal.type("grep -E 'charge|ship' tenure.yaml")
        terminal.type("tenure serve &> server.log &", until=is_ready)
        terminal.type(
            f"curl -sS {url}/v1/chat/completions --json '"
            f'{{"model": "shop",\n    "session_id": "{SESSION}", '
            '"messages": [{"role": "user", "content": "Charge and ship"}]}\' &',
            until=lambda: wait_for(lambda: called("ship_order"), "the call of ship_order"),
        )
        terminal.type("cat calls.log    # the two tools append a line for each call")
        terminal.type(
            "kill -9 %1       # the server, while it waits for ship_order",
            until=lambda: wait_for(lambda: "curl:" in terminal.received, "curl to fail"),
        )
        terminal.type(
            "tenure serve &> server.log &  # the same store, nothing else", until=is_completed
        )
        terminal.type(f"grep {SESSION} server.log    # it has found the run, and continues it")
        messages = terminal.type(f"curl -sS '{url}/sessions/{SESSION}/export?format=jsonl'")
        call_lines = terminal.type(
            "cat calls.log    # the card was charged once, one shipment was created"
        )
        check(messages, call_lines)
        return terminal.lines
    finally:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        terminal.bash.kill()


def check(messages, call_lines):
    roles = [json.loads(x)["role"] for x in messages]
    if roles != ["user", "assistant", "tool", "assistant", "tool", "assistant"]:
        raise Failure(f"expected two tool calls, their results and an answer, got {roles}")
    tools = [x.split()[0] for x in call_lines]
    if tools != ["charge_card", "ship_order", "ship_order"]:
        raise Failure(f"expected one call of charge_card and two of ship_order, got {tools}")
    keys = {x.split()[1] for x in call_lines if x.startswith("ship_order")}
    if len(keys) != 1 or len(ScriptedServices.shipments) != 1:
        raise Failure(f"expected the repeated ship_order to have the same Idempotency-Key: {keys}")


# The picture -------------------------------------------------------------------------------------

FONT = 13
LINE = 19
GAP = 5  # before a command
WIDTH = 8.0  # of a column; the widest of the fonts below needs 0.61 × FONT
MARGIN = 20
BAR = 34
TITLE = "tenure: a run survives kill -9 in the middle of a tool call"
STYLE = """
  text { font: %dpx ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
         fill: #c9d1d9; white-space: pre }
  .prompt { fill: #7ee787 } .command { fill: #ffffff } .kill { fill: #ff7b72; font-weight: bold }
  .note { fill: #8b949e } .title { fill: #8b949e; text-anchor: middle }
  .line { animation: appear 0.15s both }
  @keyframes appear { from { opacity: 0.3 } to { opacity: 1 } }
  @media (prefers-reduced-motion: reduce) { .line { animation: none } }
""" % FONT


def shortened(line):
    """The line, without most of a long id, and cut at the right margin."""
    line = re.sub(r"\brun_[0-9a-z]{12}([0-9a-z]{4})\b", r"run_…\1", line)
    line = re.sub(r"^\d{4}-\d\d-\d\dT([\d:]{8})\.\d+Z\s+", r"…\1 ", line)
    return line if len(line) <= COLUMNS else line[: COLUMNS - 1] + "…"


def spans(kind, line):
    """The line as (class, text) pairs."""
    if kind == "output":
        return [(None, line)]
    command, note = re.fullmatch(r"(.*?)(\s+# .*)?", line).groups()
    style = "kill" if command.startswith("kill") else "command"
    pairs = [(style, command), ("note", note or "")]
    return [("prompt", "$ "), *pairs] if kind == "command" else pairs


def svg(lines):
    width = round(COLUMNS * WIDTH + 2 * MARGIN)
    commands = sum(kind == "command" for kind, _ in lines)
    height = BAR + LINE * len(lines) + GAP * commands + MARGIN - GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{TITLE}">',
        f"<style>{STYLE}</style>",
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" '
        'fill="#0d1117" stroke="#444c56"/>',
        '<circle cx="20" cy="17" r="5.5" fill="#ff5f56"/>',
        '<circle cx="38" cy="17" r="5.5" fill="#ffbd2e"/>',
        '<circle cx="56" cy="17" r="5.5" fill="#27c93f"/>',
        f'<text class="title" x="{width / 2}" y="21">{TITLE}</text>',
    ]
    # Lines are dimmed until it is their turn, never hidden: any frame can be read. Without
    # animations the picture is the last frame.
    delay = 0.0
    y = BAR + FONT - LINE - GAP
    for number, (kind, line) in enumerate(lines):
        if kind == "command" and number:
            delay += 1.0
        elif kind == "output" and lines[number - 1][0] != "output":
            delay += 0.6
        text = "".join(
            f'<tspan class="{style}">{escape(t, False)}</tspan>' if style else escape(t, False)
            for style, t in spans(kind, shortened(line))
            if t
        )
        y += LINE + (GAP if kind == "command" else 0)
        parts.append(
            f'<text class="line" x="{MARGIN}" y="{y}" xml:space="preserve" '
            f'style="animation-delay:{delay:.1f}s">{text}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description="Records docs/demo.svg.")
    parser.add_argument("binary", nargs="?", default=ROOT / "target/release/tenure", type=Path)
    parser.add_argument("--output", default=ROOT / "docs/demo.svg", type=Path)
    parser.add_argument("--port", default=18787, type=int, help="and the one after it")
    args = parser.parse_args()
    if not os.access(args.binary, os.X_OK):
        sys.exit(f"record-demo.py: no binary at {args.binary}; run `cargo build --release` first")

    with tempfile.TemporaryDirectory(prefix="tenure-demo-") as home:
        ScriptedServices.directory = directory = Path(home, "shop")
        path = Path(home, "bin")
        directory.mkdir()
        path.mkdir()
        (path / "tenure").symlink_to(args.binary.resolve())
        try:
            services = ThreadingHTTPServer(("127.0.0.1", args.port + 1), ScriptedServices)
            threading.Thread(target=services.serve_forever, daemon=True).start()
            lines = scenario(directory, path, args.port)
        except (Failure, OSError, ValueError) as error:
            sys.exit(f"record-demo.py: {error}")
    picture = svg(lines)
    args.output.write_text(picture, encoding="utf-8")
    for kind, line in lines:
        print(("$ " if kind == "command" else "") + shortened(line))
    print(f"{len(lines)} lines, {len(picture.encode()):,} bytes: {args.output}", file=sys.stderr)


if __name__ == "__main__":
    main()
