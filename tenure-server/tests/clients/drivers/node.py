"""Conversations with the Node clients, in one Node process for all of them."""

import json
import os
import pathlib
import shutil
import subprocess

SOURCES = pathlib.Path(__file__).parents[1] / "node"


def modules_directory() -> pathlib.Path:
    """The directory with the node_modules that scripts/node-env.sh installs."""
    default = pathlib.Path(__file__).parents[4] / "target/clients-node"
    return pathlib.Path(os.environ.get("TENURE_TEST_NODE") or default)


class NodeHost:
    """The Node process. It is started when it is first needed."""

    def __init__(self):
        self.process = None

    def call(self, request: dict) -> dict:
        if self.process is None:
            self.start()
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the Node process has ended; its error output is above")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply

    def start(self):
        # Modules are looked up from where a file is, so the sources go beside node_modules.
        directory = modules_directory()
        for source in SOURCES.glob("*.mjs"):
            shutil.copy(source, directory)
        self.process = subprocess.Popen(
            ["node", directory / "host.mjs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self):
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait(10)
            self.process = None


HOST = NodeHost()


class NodeClient:
    """One conversation in the Node process."""

    name: str

    def __init__(self, base_url, session_id=None, user="default", style="append", stream=False):
        options = {
            "client": self.name,
            "baseUrl": base_url,
            "sessionId": session_id,
            "user": user,
            "style": style,
            "stream": stream,
        }
        self.conversation = HOST.call({"open": options})["conversation"]

    def ask(self, text):
        request = {"conversation": self.conversation, "text": text}
        return HOST.call({"ask": request})["answer"]

    def close(self):
        pass


class OpenAINode(NodeClient):
    name = "openai-node"


class VercelAI(NodeClient):
    name = "vercel-ai"
