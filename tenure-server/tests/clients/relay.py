"""A TCP relay between a client and the server that keeps a copy of what the server sends back.

Most client libraries hide the `session` object of a response. The relay passes bytes on unchanged,
so the tests can read the object without touching the client.
"""

import contextlib
import json
import re
import socket
import socketserver
import threading


class Connection(socketserver.BaseRequestHandler):
    def handle(self):
        try:
            upstream = socket.create_connection(self.server.upstream)
        except ConnectionRefusedError:
            return  # the client sees that its connection is closed
        for connection in (self.request, upstream):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        requests = threading.Thread(target=copy_bytes, args=(self.request, upstream), daemon=True)
        requests.start()
        received = bytearray()
        self.server.received.append(received)
        copy_bytes(upstream, self.request, received)
        requests.join()


def copy_bytes(source: socket.socket, target: socket.socket, received: bytearray | None = None):
    """Copies until the source ends, then ends both directions of the target."""
    # An error means that one of the two has disconnected; the other connection is closed below.
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            if received is not None:
                received += data
            target.sendall(data)
    for connection in (source, target):
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class Relay:
    """One relay per conversation, so that what it has received belongs to that conversation."""

    def __init__(self, host: str, port: int):
        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Connection)
        self.server.daemon_threads = True
        self.server.upstream = (host, port)
        self.server.received = []
        self.base_url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        # The argument is how long `close` may have to wait, in seconds.
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def reports(self) -> list[dict]:
        """The `session` objects of all responses, in order within a connection."""
        found = []
        for received in self.server.received:
            objects = re.findall(r'"session":\s*(\{[^{}]*\})', received.decode())
            found += [json.loads(text) for text in objects]
        return found

    def close(self):
        self.server.shutdown()
        self.server.server_close()
