"""The real binary on a free port, with its built-in model, and OpenAI's own client in front of it."""

import os
import pathlib
import subprocess

import openai
import pytest

BINARY = os.environ.get("TENURE_TEST_BINARY") or str(pathlib.Path(__file__).parents[3] / "target/debug/tenure")


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """The address of a server that was started for these tests."""
    directory = tmp_path_factory.mktemp("server")
    command = [BINARY, "serve", "--listen", "127.0.0.1:0"]
    with (directory / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=log, text=True)
    line = server.stdout.readline()
    assert line.startswith("listening on "), line
    yield line.removeprefix("listening on ").strip()
    server.terminate()
    assert server.wait(20) == 0, "it stops when it is told to, and says that all is well"


@pytest.fixture
def client(base):
    return openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
