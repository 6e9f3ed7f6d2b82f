"""The server of the page: this machine only, one document, two JSON answers, and a live socket.

Starlette and uvicorn are imported here and nowhere else. Foreign hosts and origins are turned away, so
that no other page of the browser can talk to it.
"""

import asyncio
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from phalanx.explore.answers import NAMES, answer, later, reply
from phalanx.explore.board import Board
from phalanx.explore.live import View
from phalanx.explore.page import document
from phalanx.explore.run_view import listing, view
from phalanx.explore.runs import found_in, read_run
from phalanx.explore.searching import search_lines
from phalanx.explore.state import State

HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
TYPES = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
QUIET = 0.03  # seconds without a message, after which slow panels have their turn
MISDIRECTED, FORBIDDEN, POLICY_VIOLATION = 421, 403, 1008


class Guard:
    """Turns away foreign hosts and origins, and adds the headers that keep the page alone.

    Args:
        app: what stands behind it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or hand it on."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        refused = self._refusal(scope)
        if refused and scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        elif refused:
            status, text = refused
            await PlainTextResponse(text, status, HEADERS)(scope, receive, send)
        else:
            await self._app(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]
        }
        host = headers.get("host", "")
        if _bare(host) not in HOSTS:
            return MISDIRECTED, f"this server is for {', '.join(sorted(HOSTS))} only"
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return FORBIDDEN, "a page of another origin cannot use this server"
        if scope["type"] == "websocket" and origin is None:
            return FORBIDDEN, "a live connection says where it comes from"
        return None


def _bare(host: str) -> str:
    """The host without its port."""
    name, colon, port = host.rpartition(":")
    return name.lower() if colon and port.isdigit() else host.lower()


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            found = {key.lower() for key, _ in message.get("headers", [])}
            extra = [
                (key.encode(), value.encode())
                for key, value in HEADERS.items()
                if key.encode() not in found
            ]
            message = {**message, "headers": [*message.get("headers", []), *extra]}
        await send(message)

    return sending


def application(runs: Sequence[Path] = (), board: Board | None = None) -> ASGIApp:
    """The server as an ASGI application.

    Args:
        runs: run directories, or folders of them.
        board: where panels come from.
    """
    own = board or Board()
    pages: list[Any] = [
        Route("/", _page(own)),
        *(Route(f"/api/v1/{name}", _asked(name, own)) for name in NAMES),
        Route("/api/v1/plan", _plan),
        Route("/api/v1/runs", _runs(runs)),
        Route("/static/{name}", _static),
        WebSocketRoute("/api/v1/live", _live(own)),
    ]
    return Guard(Starlette(routes=pages))


def _page(board: Board) -> Callable[[Request], Any]:
    async def page(request: Request) -> Response:
        state = State.parse(request.url.query)
        shown = await run_in_threadpool(board.shown, state)
        return HTMLResponse(document(shown, list(state.problems)))

    return page


def _asked(name: str, board: Board) -> Callable[[Request], Any]:
    async def asked(request: Request) -> Response:
        found = await run_in_threadpool(answer, name, request.url.query, board)
        return Response(found.body, found.status, media_type=found.kind)

    return asked


async def _plan(request: Request) -> Response:
    """A search, as lines: signs of life, then the ranking. A reader that leaves ends it."""
    lines = search_lines(request.url.query)
    return StreamingResponse(lines, media_type="application/x-ndjson")


def _runs(given: Sequence[Path]) -> Callable[[Request], Any]:
    """Runs by their number in the list: no path ever comes from a request."""

    async def runs(request: Request) -> Response:
        asked = request.query_params.getlist("run")
        return JSONResponse(await run_in_threadpool(_run_view, given, asked))

    return runs


def _run_view(given: Sequence[Path], asked: Sequence[str]) -> dict[str, str]:
    folders = found_in(given)
    numbers = [int(text) for text in asked if text.isdecimal() and int(text) < len(folders)]
    chosen = numbers if asked else list(range(len(folders)))[-1:]
    shown = view([read_run(folders[number]) for number in chosen])
    return {"list": listing([folder.resolve().name for folder in folders], chosen), "view": shown}


async def _static(request: Request) -> Response:
    """A file of the page; only names that are there."""
    name = request.path_params["name"]
    folder = files("phalanx.explore") / "static"
    if name not in {entry.name for entry in folder.iterdir()}:
        return PlainTextResponse("no such file", 404)
    kind = TYPES.get(name.rpartition(".")[2], "text/plain")
    return Response((folder / name).read_bytes(), media_type=f"{kind}; charset=utf-8")


def _live(board: Board) -> Callable[[WebSocket], Any]:
    async def live(socket: WebSocket) -> None:
        await socket.accept()
        view = View(board)
        try:
            while True:
                text = await _next_text(socket, view)
                await socket.send_text(await run_in_threadpool(reply, view, text))
        except WebSocketDisconnect:
            return

    return live


async def _next_text(socket: WebSocket, view: View) -> str:
    """The next message; while none comes, what takes longer is sent."""
    coming = asyncio.ensure_future(socket.receive_text())
    try:
        done, _ = await asyncio.wait([coming], timeout=QUIET)
        if not done:
            slow = await run_in_threadpool(later, view)
            if slow is not None:
                await socket.send_text(slow)
        return await coming
    finally:
        coming.cancel()
