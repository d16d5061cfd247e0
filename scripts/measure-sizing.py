#!/usr/bin/env python3
"""Measures what a number of users need: memory, file descriptors, disk and latency of a server.

    scripts/measure-sizing.py target/release/tenure [--users 1000] [--turns 10] [--store sqlite:tenure.db]

Starts a model server that streams an answer of 100 words within two seconds, and the server in front of it, in a
temporary directory. All users chat at the same time, each in a session of their own, over a connection of their own.
Prints what docs/operations.md reports. Only the standard library is used.
"""

import argparse
import asyncio
import atexit
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

WORDS = 100
SECONDS = 2.0
QUESTION = "What does the fare for two adults and a child cost on a weekday? " * 4


async def model(reader, writer):
    """Answers requests on one connection, with chunks spread over the time of an answer."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(re.search(rb"content-length: (\d+)", head.lower())[1])
            await reader.readexactly(length)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for i in range(WORDS // 10 + 1):
                finish = "stop" if i == WORDS // 10 else None
                delta = {} if finish else {"content": "someword " * 10}
                usage = {"usage": {"prompt_tokens": 100, "completion_tokens": WORDS, "total_tokens": 200}} if finish else {}
                chunk = {"id": "c", "object": "chat.completion.chunk", "model": "m", **usage,
                         "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
                data = b"data: " + json.dumps(chunk).encode() + b"\n\n" + (b"data: [DONE]\n\n" if finish else b"")
                writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                await writer.drain()
                await asyncio.sleep(SECONDS / (WORDS // 10))
            writer.write(b"0\r\n\r\n")
            await writer.drain()
    except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
        pass
    finally:
        writer.close()


async def user(number, port, key, turns, delay, latencies):
    """One user: a connection, a session, some turns. Records the time to the first chunk of each answer."""
    await asyncio.sleep(delay)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for turn in range(turns):
        body = json.dumps({"model": "m", "session_id": f"s{number}", "stream": True, "history": "append",
                           "messages": [{"role": "user", "content": f"{turn} {QUESTION}"}]}).encode()
        head = (f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
                f"x-tenure-user: user{number}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n")
        started = time.monotonic()
        writer.write(head.encode() + body)
        status = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in status.split(b"\r\n")[0], status
        first = True
        while True:
            size = int(await reader.readuntil(b"\r\n"), 16)
            await reader.readexactly(size + 2)
            if first:
                latencies.append(time.monotonic() - started)
                first = False
            if size == 0:
                break
    writer.close()


def process(pid):
    """Resident memory in MB and the number of open descriptors."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024, len(os.listdir(f"/proc/{pid}/fd"))


async def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary", type=pathlib.Path)
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--store", default="sqlite:tenure.db")
    options = parser.parse_args()
    binary = options.binary.resolve()
    directory = pathlib.Path(tempfile.mkdtemp(prefix="tenure-sizing-"))
    atexit.register(shutil.rmtree, directory)
    upstream = await asyncio.start_server(model, "127.0.0.1", 0, backlog=4096)
    upstream_port = upstream.sockets[0].getsockname()[1]
    (directory / "tenure.yaml").write_text(
        f"store: '{options.store}'\nlisten: 127.0.0.1:0\ntrusted_proxies: [127.0.0.1]\n"
        f"limits: {{max_connections: {options.users + 100}}}\ntelemetry: {{log: warn}}\n"
        f"models: [{{name: m, base_url: 'http://127.0.0.1:{upstream_port}/v1'}}]\n")
    key = subprocess.run([binary, "keys", "add", "--rights", "read,write,admin"], cwd=directory, check=True,
                         capture_output=True, text=True).stdout.strip()
    server = subprocess.Popen([binary, "serve"], cwd=directory, stdout=subprocess.PIPE, text=True)
    port = int(server.stdout.readline().strip().rsplit(":", 1)[1])
    idle, idle_descriptors = process(server.pid)
    peak = [idle, idle_descriptors]
    latencies = []
    # Users begin within one answer, so that all of them are active at once without a common first second.
    users = [user(n, port, key, options.turns, SECONDS * n / options.users, latencies) for n in range(options.users)]
    started = time.monotonic()
    work = asyncio.gather(*users)
    while not work.done():
        await asyncio.wait([work], timeout=0.2)
        peak = [max(a, b) for a, b in zip(peak, process(server.pid))]
    await work
    elapsed = time.monotonic() - started
    cpu = sum(int(f) for f in pathlib.Path(f"/proc/{server.pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]) / 100
    server.terminate()
    server.wait()
    turns = options.users * options.turns
    latencies.sort()
    print(f"{options.users} users, {turns} turns in {elapsed:.0f} s: {turns / elapsed:.0f} turns/s, store {options.store}")
    print(f"memory: {idle:.0f} MB idle, {peak[0]:.0f} MB at most: {(peak[0] - idle) * 1024 / options.users:.0f} KB per active user")
    print(f"descriptors: {idle_descriptors} idle, {peak[1]} at most: {(peak[1] - idle_descriptors) / options.users:.1f} per active user")
    print(f"CPU: {cpu * 1000 / turns:.2f} ms per turn, {cpu / elapsed:.2f} cores")
    middle, late = latencies[len(latencies) // 2], latencies[len(latencies) * 99 // 100]
    print(f"time to the first chunk: {middle * 1000:.0f} ms (median), {late * 1000:.0f} ms (99 %)")
    size = sum(f.stat().st_size for f in directory.rglob("*") if f.is_file() and not f.name.endswith("-reserve"))
    if not options.store.startswith("postgres"):
        print(f"disk: {size / 1e6:.1f} MB, {size / turns / 1024:.1f} KB per turn of {len(QUESTION) + WORDS * 9} characters")
    if not options.store.startswith("postgres"):
        commands = {"backup": ["backup", "backup.jsonl"], "restore": ["--store", "sqlite:restored.db", "restore", "backup.jsonl"]}
        for name, command in commands.items():
            started = time.monotonic()
            subprocess.run([binary, *command], cwd=directory, check=True, capture_output=True)
            megabytes = (directory / "backup.jsonl").stat().st_size / 1e6
            print(f"{name}: {time.monotonic() - started:.1f} s for {megabytes:.0f} MB")
    return 0


if __name__ == "__main__":
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    sys.exit(asyncio.run(main()))
