"""Which clients are tested, in which styles, and what is skipped where it can not be tested."""

import os
import shutil

import pytest

from drivers import CLIENTS, Client
from drivers.node import modules_directory

STREAMS = {"plain": False, "stream": True}


def all_cases(*styles: str, clients=CLIENTS) -> dict[str, tuple[Client, str, bool]]:
    """Client, style and stream, by the name of the case."""
    return {
        f"{client.name}-{style}-{name}": (client, style, stream)
        for client in clients
        for style in client.styles
        if style in styles
        for name, stream in STREAMS.items()
    }


def cases(*styles: str, clients=CLIENTS):
    """Runs a test with the parameters `client, style, stream`, for clients with these styles."""
    found = all_cases(*styles, clients=clients)
    return pytest.mark.parametrize("client, style, stream", found.values(), ids=found.keys())


def available(client: Client) -> bool:
    """Whether a client can be used here."""
    has_node = shutil.which("node") and (modules_directory() / "node_modules").is_dir()
    return bool(has_node) or not client.in_node


def skip_unless_ci(reason: str):
    """Skips what can not be tested here. In CI nothing is skipped."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
