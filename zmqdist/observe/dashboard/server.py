"""The web server of the dashboard. It serves one page and the facts for it, on loopback only.

Nothing that it serves changes anything: it has GET, and POST for the exchange of a link's code
against a token (access.py). Files are served from a table that is read at the start, so no path of
a request reaches the file system. The secrets of the cluster stay in this process.

Starlette and uvicorn are imported when a dashboard starts, because they are an extra.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from zmqdist import clock as time
from zmqdist.errors import FailedPreconditionError, OpError, UnavailableError, needs
from zmqdist.observe.dashboard.access import NO_TOKEN, Access, refusal
from zmqdist.observe.dashboard.feed import Call, Feed

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

PAGE: Final = Path(__file__).parent / "page"

TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""The types of the page's files. A file with another ending is not served."""

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
"""The headers of every response. With trusted types the browser itself refuses to turn a text into
markup or a script, whatever the page does."""

BODY_BYTES_MAX: Final = 1024
"""Bytes of the body with a code."""

CONNECTIONS_MAX: Final = 64
CLOSE_S: Final = 5.0

ASK_S: Final = 15.0
"""Seconds that a question to workers may take. The dispatcher gives up before."""

Say = Callable[[str], object]


class Dashboard:
    """A running dashboard, for a with-statement.

    Args:
      call: calls a method of the dispatcher by name and returns its result. It may raise OpError.
      port: the port on 127.0.0.1; 0 takes a free one.
      say: is called with a link at the start, and with a new one whenever one was used.

    Raises:
      FailedPreconditionError: starlette or uvicorn is not installed.
      UnavailableError: the port cannot be bound.
    """

    def __init__(self, call: Call, port: int = 0, say: Say | None = None) -> None:
        check_installed()
        import uvicorn

        self._access = Access()
        self._say = say
        self._socket = _bound(port)
        self._port = self._socket.getsockname()[1]
        self._feed = Feed(call)
        settings: dict[str, Any] = {"http": "h11", "ws": "none", "lifespan": "off"}
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app(),
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=CONNECTIONS_MAX,
                timeout_graceful_shutdown=1,
                **settings,
            )
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._serve, name="zmqdist-dashboard", daemon=True)
        self._thread.start()
        if say is not None:
            say(f"dashboard: {self.url}")

    @property
    def url(self) -> str:
        """A new link, which opens the dashboard once. Its code stands behind the "#", which a
        browser sends to no server."""
        return f"http://127.0.0.1:{self._port}/#code={self._access.new_code()}"

    def close(self) -> None:
        """End all streams and the server. A second call does nothing."""
        self._server.should_exit = True
        if (loop := self._loop) is not None and not loop.is_closed():
            loop.call_soon_threadsafe(lambda: loop.create_task(self._feed.close()))
        self._thread.join(CLOSE_S)
        self._socket.close()

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await self._server.serve([self._socket])

        asyncio.run(serve())

    def _app(self) -> ASGIApp:
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [
            Route("/api/session", self._session, methods=["POST"]),
            Route("/api/facts", self._facts, methods=["GET"]),
            Route("/api/ask/{method}", self._ask, methods=["GET"]),
            *(Route(path, _file(*file), methods=["GET"]) for path, file in files().items()),
        ]
        return Guard(Starlette(routes=routes), self._port)

    async def _session(self, request: Request) -> Response:
        """Exchange the code of a link for a token."""
        code = await _code(request)
        token, problem = self._access.exchange(code, time.monotonic())
        if problem:
            return _json({"problem": problem}, 403)
        if self._say is not None:
            self._say(f"the link was used; a new one: {self.url}")
        return _json({"token": token})

    async def _facts(self, request: Request) -> Response:
        from starlette.responses import StreamingResponse

        if not self._may_read(request):
            return _json({"problem": NO_TOKEN}, 401)
        return StreamingResponse(self._feed.lines(), media_type="application/x-ndjson")

    async def _ask(self, request: Request) -> Response:
        """Ask a worker for its log lines or its stacks."""
        if not self._may_read(request):
            return _json({"problem": NO_TOKEN}, 401)
        worker = request.query_params.get("worker", "")
        questions: dict[str, tuple[Any, ...]] = {
            "logs": (worker, _number(request.query_params.get("since", "")), 0.0),
            "stack": (worker,),
        }
        method = request.path_params["method"]
        if method not in questions:
            return _json({"problem": "There is no such question."}, 404)
        try:
            answer = await self._feed.ask(method, *questions[method], timeout_s=ASK_S)
        except OpError as error:
            return _json({"problem": str(error)})
        return _json({"answer": answer})

    def _may_read(self, request: Request) -> bool:
        return self._access.may_read(request.headers.get("authorization", ""))


class Guard:
    """Refuses requests by their headers (access.py), and adds HEADERS to every response."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        self._port = port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *extra]}
            await send(message)

        app = self._app
        if problem := refusal(headers, scope["path"], self._port):
            app = _json({"problem": problem}, 403)
        await app(scope, receive, send_guarded)


def check_installed() -> None:
    """Raise FailedPreconditionError if a package of the extra `dashboard` is missing."""
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise FailedPreconditionError(needs("the dashboard", "'zmqdist[dashboard]'"))


def _bound(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(CONNECTIONS_MAX)
    except OSError as error:
        listener.close()
        problem = f"the dashboard cannot use port {port} ({error.strerror}): choose another"
        raise UnavailableError(problem) from None
    return listener


def files() -> dict[str, tuple[bytes, str]]:
    """Return what each path of the page serves: the bytes and their type."""
    table = {
        f"/{path.relative_to(PAGE).as_posix()}": (path.read_bytes(), TYPES[path.suffix])
        for path in PAGE.rglob("*")
        if path.suffix in TYPES
    }
    return {**table, "/": table["/index.html"]}


def _file(body: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    from starlette.responses import Response

    async def serve(request: Request) -> Response:
        return Response(body, media_type=media_type)

    return serve


async def _code(request: Request) -> str:
    """Return the code in the body of a request, or "" if it holds none."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > BODY_BYTES_MAX:
            return ""
    try:
        return str(msgspec.json.decode(body)["code"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return ""


def _number(text: str) -> int:
    """Return the number in a text, or -1, which stands for the lines that workers keep."""
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else -1


def _json(value: Any, status: int = 200) -> Response:
    from starlette.responses import Response

    return Response(msgspec.json.encode(value), status, media_type="application/json")
