"""Pages in a real browser: headless Chromium, and a web server that serves them and takes their reports."""

import contextlib
import functools
import http.server
import json
import os
import pathlib
import queue
import subprocess
import tempfile
import threading

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
