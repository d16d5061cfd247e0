"""Pages in a real browser: headless Chromium, and a web server that serves them and takes their reports."""

import contextlib
import fcntl
import functools
import http.server
import json
import os
import pathlib
import queue
import subprocess
import tempfile
import threading
import time

CHROMIUM = os.environ.get("TENURE_TEST_CHROMIUM", "")
NODE_MODULES = pathlib.Path(os.environ.get("TENURE_TEST_NODE", ".")) / "node_modules"

# Without the background requests that Chromium makes by itself.
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Pages(http.server.SimpleHTTPRequestHandler):
    """Serves one page, the files of Node packages, and takes the page's report."""

    def __init__(self, *args, page: str, reports: queue.Queue, **kwargs):
        self.page, self.reports = page, reports
        super().__init__(*args, directory=str(NODE_MODULES), **kwargs)

    def do_GET(self):
        if self.path != "/":
            return super().do_GET()
        body = self.page.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.reports.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def guess_type(self, path):
        return "text/javascript" if str(path).endswith((".js", ".mjs")) else super().guess_type(path)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def web_server(page: str = ""):
    """Serves a page; gives its port and the queue of its reports."""
    reports: queue.Queue = queue.Queue()
    handler = functools.partial(Pages, page=page, reports=reports)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server, reports
    finally:
        server.shutdown()
        server.server_close()


def visit(url: str, reports: queue.Queue) -> dict:
    """Opens a page in Chromium and waits for what it reports."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        chromium = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", url],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            return reports.get(timeout=120)
        finally:
            chromium.terminate()
            chromium.wait(30)


class Browser:
    """Chromium, controlled through its DevTools protocol: JSON messages over two pipes, its file descriptors 3 and 4."""

    def __init__(self, profile: str):
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        # Copies with numbers that `dup2` below does not overwrite.
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (read, write)]

        def take_pipes():
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self._chromium = subprocess.Popen(
            [CHROMIUM, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Python's own descriptors are not inherited; the copies of `dup2` are.
            close_fds=False,
            preexec_fn=take_pipes,
        )
        for fd in (read, write, *ends):
            os.close(fd)
        self._buffer = b""
        self._last_id = 0
        self._session = None

    def call(self, method: str, **params):
        """Calls a method of the protocol and returns its result."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._buffer:
                part = os.read(self._read, 1 << 20)
                assert part, "Chromium has ended"
                self._buffer += part
            text, self._buffer = self._buffer.split(b"\0", 1)
            answer = json.loads(text)
            if answer.get("id") == self._last_id:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, url: str):
        """Opens a page and waits until it is loaded."""
        target = self.call("Target.createTarget", url=url)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str):
        """Evaluates an expression in the page; a promise is awaited."""
        result = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str):
        """Waits until an expression is true, and returns its value."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if value := self.evaluate(expression):
                return value
            time.sleep(0.05)  # polling interval
        raise AssertionError(f"never true: {expression}")

    def close(self):
        self._chromium.terminate()
        self._chromium.wait(30)
        os.close(self._read)
        os.close(self._write)


@contextlib.contextmanager
def browser():
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        controlled = Browser(profile)
        try:
            yield controlled
        finally:
            controlled.close()
