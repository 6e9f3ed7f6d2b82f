"""Asks the server of the page, as curl would."""

from http.client import HTTPConnection
from typing import NamedTuple


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: dict[str, str]
    text: str


def get(address: str, path: str = "/", **headers: str) -> Answer:
    """One answer of the server at `address`."""
    connection = HTTPConnection(address, timeout=30)
    try:
        connection.request("GET", path, headers={"Connection": "close", **headers})
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, found, answer.read().decode())
    finally:
        connection.close()
