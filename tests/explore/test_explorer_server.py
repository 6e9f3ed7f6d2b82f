import json
import re
import signal
import subprocess
import sys

import pytest
from explorer_client import get
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from phalanx.explore.inputs import INPUTS


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1"]
)
def test_a_foreign_host_is_misdirected(address: str, host: str):
    assert get(address, Host=host).status == 421


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:1", "http://localhost"]
)
def test_a_foreign_origin_is_forbidden(address: str, origin: str):
    assert get(address, Origin=origin).status == 403
    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://{address}/api/v1/live", origin=origin).close()
    assert refused.value.response.status_code == 403


def test_a_live_connection_without_an_origin_is_forbidden(address: str):
    with pytest.raises(InvalidStatus):
        connect(f"ws://{address}/api/v1/live").close()


@pytest.mark.parametrize("path", ["/", "/api/v1/state", "/static/app.js", "/nothing"])
def test_every_answer_forbids_foreign_code_and_sniffing(address: str, path: str):
    answer = get(address, path)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_first_document_has_no_inline_script_or_style_and_no_foreign_address(address: str):
    html = get(address).text
    assert not re.search(r"<script(?![^>]*src=)", html)
    assert not re.search(r"\son[a-z]+=|\sstyle=", html)
    assert not re.search(r"""(?:src|href)=["'](?:https?:)?//""", html)
    assert "2,199" in html  # reads without a script


def test_a_hostile_query_is_inert(address: str):
    html = get(
        address, "/?%3Cscript%3Ealert(1)%3C/script%3E=1&tp=%3Cimg%20src=x%20onerror=alert(1)%3E"
    ).text
    assert "<script>alert" not in html
    assert "<img" not in html
    assert "&lt;script&gt;" in html


@pytest.mark.parametrize("name", ["../server.py", "..%2fserver.py", "nothing.js", "%00"])
def test_only_files_of_the_page_are_served(address: str, name: str):
    assert get(address, f"/static/{name}").status == 404


def test_the_inputs_are_listed_with_their_ranges(address: str):
    found = json.loads(get(address, "/api/v1/inputs").text)
    assert [item["key"] for item in found["inputs"]] == [item.key for item in INPUTS]
    tp = next(item for item in found["inputs"] if item["key"] == "tp")
    assert (tp["default"], tp["low"], tp["scale"]) == (8, 1, "binary")


def test_only_what_has_changed_comes_back(address: str):
    with connect(f"ws://{address}/api/v1/live", origin=f"http://{address}") as live:

        def ask(**message: object) -> dict[str, object]:
            live.send(json.dumps({"n": 1, "state": "", **message}))
            return json.loads(live.recv())

        first = ask(see=["data", "tensor"])
        assert "dp.floor" in first["records"]
        assert ask(see=["data", "tensor"])["records"] == {}
        moved = ask(see=["data", "tensor"], edit={"steps": ["tp", 1]})
        assert moved["state"] == "v1&tp=16"
        assert "tp.verdict" in moved["records"]
        assert "dp.floor" not in moved["records"]
        assert moved["inputs"].keys() == {"tp"}


BAD_MESSAGES = [
    "",
    "[]",
    "{",
    '{"state": 1}',
    '{"state": "", "edit": {"steps": ["x", 1]}}',
    '{"state": "", "see": "all"}',
    '{"state": "", "edit": []}',
    "[" * 9000,
]


@pytest.mark.parametrize("text", BAD_MESSAGES)
def test_a_bad_message_is_answered_and_nothing_ends(address: str, text: str):
    with connect(f"ws://{address}/api/v1/live", origin=f"http://{address}") as live:
        live.send(text)
        assert json.loads(live.recv())["error"]
        live.send('{"n": 2, "state": "v1&tp=4", "see": []}')
        assert json.loads(live.recv())["state"] == "v1&tp=4"


def test_the_command_serves_until_it_is_interrupted_and_ends_well():
    command = [sys.executable, "-m", "phalanx", "explore", "--no-browser", "--port", "0"]
    with subprocess.Popen(
        [*command, "--set", "tp=16"], stdout=subprocess.PIPE, text=True
    ) as server:
        address = server.stdout.readline().strip()
        assert address.endswith("/?v1&tp=16")
        host = address.removeprefix("http://").partition("/")[0]
        with connect(f"ws://{host}/api/v1/live", origin=f"http://{host}"):
            server.send_signal(signal.SIGINT)
            assert server.wait(20) == 0
