"""The real server, as a process in front of a model server."""

import contextlib
import os
import pathlib
import subprocess

import httpx

BINARY = os.environ.get("TENURE_TEST_BINARY") or str(
    pathlib.Path(__file__).parents[3] / "target/debug/tenure"
)


class Tenure:
    """A server with its own directory. After `kill` it can be started again, on the same port."""

    def __init__(self, directory: pathlib.Path, store: str, model_url: str):
        self.directory = directory
        self.port = 0
        self.process = None
        config = f"store: {store}\nmodels:\n  - {{name: default, base_url: {model_url}}}\n"
        (directory / "tenure.yaml").write_text(config)

    def start(self):
        with (self.directory / "log").open("a") as log:
            self.process = subprocess.Popen(
                [BINARY, "serve", "--listen", f"127.0.0.1:{self.port}"],
                cwd=self.directory,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        line = self.process.stdout.readline()
        assert line.startswith("listening on "), (line, self.log())
        self.url = line.removeprefix("listening on ").strip()
        self.port = int(self.url.rsplit(":", 1)[1])

    def kill(self):
        """Ends the process as a crash would: SIGKILL."""
        self.process.kill()
        self.process.wait(10)

    def stop(self):
        self.process.terminate()
        assert self.process.wait(20) == 0, self.log()

    def log(self) -> str:
        return (self.directory / "log").read_text()

    def get(self, path: str, user: str) -> dict:
        response = httpx.get(f"{self.url}{path}", headers={"X-Tenure-User": user}, timeout=10)
        response.raise_for_status()
        return response.json()

    def sessions(self, user: str) -> list[dict]:
        """All sessions of a user, whole, with what was discarded from them."""
        listed = self.get(f"/sessions?user={user}&limit=100", user)["data"]
        return [
            self.get(f"/sessions/{session['id']}?include=discarded", user) for session in listed
        ]


@contextlib.contextmanager
def running_server(directory: pathlib.Path, store: str, model_url: str):
    tenure = Tenure(directory, store, model_url)
    tenure.start()
    try:
        yield tenure
    finally:
        tenure.stop()
