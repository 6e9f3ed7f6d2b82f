"""A drill that takes hours can be ended and goes on: what came of each injury, a line each."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.core.errors import UsageError
from phalanx.drills.campaign import DrillCase


class DrillLog:
    """The cases of a drill as they end: shown, and kept in a file so that it can go on later."""

    def __init__(
        self, path: Path | None = None, show: Callable[[DrillCase], None] = lambda _: None
    ) -> None:
        """Know nothing yet.

        Args:
            path: of the file; None keeps nothing.
            show: is told of each case, also of those of earlier sessions.
        """
        self._path, self._show = path, show
        self._done: dict[int, tuple[DrillCase, ...]] = {}

    def open(self, drill: Mapping[str, Any]) -> None:
        """Read what an earlier session has kept, if any did.

        Args:
            drill: what decides which injuries there are: seed, run and so on.

        Raises:
            UsageError: the file is the log of another drill, or none.
        """
        path, wanted = self._path, json.loads(json.dumps(dict(drill)))
        if path is None:
            return
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        if not lines:
            path.write_text(json.dumps(wanted) + "\n", encoding="utf-8")
            return
        try:
            before = json.loads(lines[0])
            changed = [key for key in wanted if before.get(key) != wanted[key]]
            self._done = dict(map(_entry, lines[1:]))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(f"{path} is no log of a drill: {error}; use another --log") from error
        if changed:
            raise UsageError(
                f"{path} is the log of another drill ({', '.join(changed)}); use another --log"
            )

    def cases(
        self, number: int, suffer: Callable[[], tuple[DrillCase, ...]]
    ) -> tuple[DrillCase, ...]:
        """What came of an injury; carried out now, unless an earlier session has.

        Args:
            number: of the injury, from 0.
            suffer: carries it out.
        """
        found = self._done.get(number, ())
        if not found:
            found = suffer()
            self._keep(number, found)
        for case in found:
            self._show(case)
        return found

    def _keep(self, number: int, found: tuple[DrillCase, ...]) -> None:
        if self._path is not None:
            entry = {"injury": number, "cases": [asdict(case) for case in found]}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


def _entry(line: str) -> tuple[int, tuple[DrillCase, ...]]:
    entry = json.loads(line)
    cases = [{**case, "differences": tuple(case["differences"])} for case in entry["cases"]]
    return int(entry["injury"]), tuple(DrillCase(**case) for case in cases)
