"""The real server in front of a stub, on each store."""

import os
import uuid

import pytest

from cases import available, skip_unless_ci
from drivers.node import HOST
from server import running_server
from stub import Stub


@pytest.fixture(autouse=True)
def skip_unavailable_clients(request):
    if "client" in request.fixturenames and not available(request.getfixturevalue("client")):
        skip_unless_ci("no Node clients: run this with scripts/node-env.sh")


@pytest.fixture(scope="session", autouse=True)
def node_host():
    yield
    HOST.close()


@pytest.fixture(scope="session")
def stub():
    with Stub() as stub:
        yield stub


@pytest.fixture(scope="session", params=["sqlite", "postgres"])
def new_store(request):
    """Makes the URL of a store of its own: a file, or a schema on the test PostgreSQL."""
    if request.param == "sqlite":
        return lambda directory: f"sqlite:{directory}/tenure.db"
    url = os.environ.get("TENURE_TEST_POSTGRES")
    if not url:
        skip_unless_ci("no PostgreSQL: run this with scripts/with-postgres.sh")
    separator = "&" if "?" in url else "?"
    return lambda directory: f"{url}{separator}schema=clients_{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def tenure(new_store, stub, tmp_path_factory):
    """One server per store, for all conversations that need no restart."""
    directory = tmp_path_factory.mktemp("server")
    with running_server(directory, new_store(directory), stub.base_url) as tenure:
        yield tenure
