"""An MCP server for tests, made with the official SDK: `mcp_server.py`, or `mcp_server.py PORT` over HTTP (0: any; it prints which)."""

import asyncio
import os
import socket
import sys

import uvicorn
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.types import ImageContent, TextContent, ToolAnnotations

server = MCPServer("tests", log_level="WARNING")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
def environment(name: str) -> str:
    """An environment variable of the server."""
    return os.environ.get(name, "not set")


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ValueError("no luck")


@server.tool(structured_output=False)
def picture() -> list[TextContent | ImageContent]:
    """A text and a picture."""
    return [TextContent(type="text", text="look:"), ImageContent(type="image", data="AAAA", mime_type="image/png")]


@server.tool()
def pid() -> str:
    """The process."""
    return str(os.getpid())


@server.tool()
async def wait(file: str) -> str:
    """Says that it was called, and never answers."""
    with open(file, "w") as out:
        out.write(str(os.getpid()))
    await asyncio.sleep(600)
    return "never"


@server.tool()
async def learn(ctx: Context) -> str:
    """Makes another tool."""
    server.add_tool(lambda: "learned", name="new.tool", description="New.")
    await ctx.session.send_tool_list_changed()
    return "done"


if len(sys.argv) > 1:
    listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(server.streamable_http_app(), log_level="warning")
    asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))
else:
    print("an MCP server for tests", file=sys.stderr, flush=True)
    server.run()
