"""Open the explorer: a page on which every number can be dragged, and the planner behind it.

The page is served on this machine alone, until Ctrl-C. Its address holds the state, so a link is a
bookmark.

phalanx explore
phalanx explore --state 'v1&model=llama-3.1-405b&dp=16&tp=8&pp=16'
phalanx explore runs/big runs/small
phalanx explore --json --set tp=16 --set chip=tpu-v5p
phalanx explore --export site --pyodide node_modules/pyodide
"""

import json
import threading
import webbrowser
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.core.errors import PhalanxError, UsageError

if TYPE_CHECKING:
    import socket

    from phalanx.explore.state import State

PORT = 8765
HOST = "127.0.0.1"


def arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes; the help text is the documentation."""
    parser.add_argument(
        "runs",
        nargs="*",
        type=Path,
        default=[Path("runs")],
        metavar="RUN",
        help="run directories, or folders of them (default runs)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=PORT,
        help=f"of the page (default {PORT}; 0 for any that is free)",
    )
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    parser.add_argument(
        "--state",
        default="",
        metavar="QUERY",
        help="where to begin: what stands behind ? in a link",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an input of the page, such as tp=16, B=3M, chip=tpu-v5p; may be given again",
    )
    parser.add_argument(
        "--json", action="store_true", help="print every record of the state, and serve nothing"
    )
    parser.add_argument(
        "--export",
        type=Path,
        metavar="DIR",
        help="write the page as files that compute in the browser, for any web server",
    )
    parser.add_argument(
        "--pyodide",
        type=Path,
        metavar="FOLDER",
        help="of Pyodide with its numpy wheel, for --export: a full release has both",
    )


def run(args: Namespace) -> int:
    """Serve the page, or print its records."""
    # imported here, so that --help comes at once
    from phalanx.explore.state import State

    state = _with(State.parse(args.state.removeprefix("?")), args.set)
    if args.export is not None or args.pyodide is not None:
        return _export(args, state)
    if args.json:
        from phalanx.explore.board import Board
        from phalanx.explore.documents import state_document

        print(json.dumps(state_document(Board(), state)))
        return 0
    if state.problems:
        raise UsageError(state.problems[0])
    try:
        import uvicorn

        from phalanx.explore.panels.published import presets
        from phalanx.explore.pauses import spare_drags
        from phalanx.explore.server import application
    except ModuleNotFoundError as missing:
        if missing.name and missing.name.partition(".")[0] in (
            "starlette",
            "uvicorn",
            "websockets",
        ):
            raise PhalanxError(
                f"the page needs {missing.name}: pip install 'phalanx[explore]'"
            ) from missing
        raise
    listening = _listen(args.port)
    query = state.query()
    address = f"http://{HOST}:{listening.getsockname()[1]}/" + (f"?{query}" if query else "")
    print(f"{address}\nCtrl-C ends it", flush=True)
    if not args.no_browser:
        webbrowser.open(address)
    config = uvicorn.Config(
        application(args.runs),
        log_level="error",
        ws="websockets-sansio",
        lifespan="off",
        timeout_graceful_shutdown=1,  # an open page does not hold the server back
    )
    spare_drags()
    threading.Thread(target=presets, daemon=True).start()  # while the browser comes up
    with suppress(KeyboardInterrupt):  # this is how it ends
        uvicorn.Server(config).run(sockets=[listening])
    return 0


def _export(args: Namespace, state: "State") -> int:
    """Write the page as static files.

    Raises:
        UsageError: a folder is missing, or is none of the right kind.
    """
    from phalanx.explore.export import export

    if args.export is None or args.pyodide is None:
        raise UsageError(
            "--export DIR and --pyodide FOLDER go together; npm install pyodide brings one"
        )
    if state.problems:
        raise UsageError(state.problems[0])
    found = export(state, args.export, args.pyodide)
    if args.json:
        print(json.dumps(found.to_dict()))
        return 0
    print(f"{found.folder}: {found.files} files, {found.bytes / 2**20:.0f} MiB; see it with")
    print(f"python -m http.server --bind {HOST} --directory {found.folder}")
    return 0


def _with(state: "State", pairs: list[str]) -> "State":
    """The state with some inputs set.

    Raises:
        UsageError: nobody knows the input, or the value cannot be.
    """
    from phalanx.core.errors import unknown
    from phalanx.explore.inputs import BY_KEY, read_value

    for pair in pairs:
        key, equals, text = pair.partition("=")
        if key not in BY_KEY:
            raise unknown("input", key, BY_KEY)
        if not equals:
            raise UsageError(f"--set {pair}: write {key}=value")
        state = state.set({key: read_value(BY_KEY[key], text)})
    return state


def _listen(port: int) -> "socket.socket":
    """A socket of this machine alone.

    Raises:
        UsageError: no such port, or somebody has it.
    """
    import socket

    if not 0 <= port <= 65535:
        raise UsageError(f"port is {port}; it can be 0 to 65535")
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((HOST, port))
        found.listen(128)
    except OSError as error:
        found.close()
        raise UsageError(
            f"port {port} cannot be had ({error.strerror}); choose another --port, or 0 for any"
        ) from error
    return found
