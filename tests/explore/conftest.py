"""A real server of the page, on a port of its own, and a real browser."""

import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from playwright.sync_api import Browser, sync_playwright
from written_runs import HOSTILE, write_run

from phalanx.explore.server import application

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the page is served, as `127.0.0.1:PORT`, with two runs, one of them hostile."""
    runs = tmp_path_factory.mktemp("runs")
    write_run(runs / "ordinary")
    write_run(runs / HOSTILE.replace("/", "∕"), text=HOSTILE)  # no file can have a slash
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        config = uvicorn.Config(
            application([runs]), log_level="error", ws="websockets-sansio", lifespan="off"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        until = time.monotonic() + 20
        while not server.started:
            assert time.monotonic() < until, "the server did not start"
            time.sleep(0.01)
        yield f"127.0.0.1:{port}"
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")  # while it is there, no other test can run a loop of its own
def browser() -> Iterator[Browser]:
    """A browser; without one its tests are skipped, and say how to get it. CI must have one."""
    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("continuous integration tests the page in a browser, and there is none")
        pytest.skip("no Chromium here: apt-get install chromium")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()
