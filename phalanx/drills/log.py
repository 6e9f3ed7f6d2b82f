"""A drill that takes hours can be ended and goes on: what came of each injury, a line each."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.core.errors import UsageError
from phalanx.drills.campaign import DrillCase


class DrillLog:
    """The cases of a drill in a file, by the number of their injury; without a file, nowhere."""

    def __init__(self, path: Path | None, drill: Mapping[str, Any]) -> None:
        """Read what is there.

        Args:
            path: of the file; it is made where it is not.
            drill: what decides which injuries there are: seed, steps, layout and so on.

        Raises:
            UsageError: it is the log of another drill, or none.
        """
        self._path = path
        self._done: dict[int, tuple[DrillCase, ...]] = {}
        if path is None:
            return
        head, *lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else [""]
        if not head:
            path.write_text(json.dumps(dict(drill)) + "\n", encoding="utf-8")
            return
        try:
            before = json.loads(head)
            for line in lines:
                entry = json.loads(line)
                cases = tuple(DrillCase(**_read(case)) for case in entry["cases"])
                self._done[int(entry["injury"])] = cases
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"{path} is no log of a drill: {error}; use another --log") from error
        if before != dict(drill):
            changed = [key for key in drill if before.get(key) != drill[key]]
            raise UsageError(
                f"{path} is the log of another drill ({', '.join(changed)}); use another --log"
            )

    def of(self, injury: int) -> tuple[DrillCase, ...]:
        """What came of an injury in an earlier session; empty where it has not been done."""
        return self._done.get(injury, ())

    def add(self, injury: int, cases: tuple[DrillCase, ...]) -> None:
        """Remember what came of an injury."""
        if self._path is not None:
            entry = {"injury": injury, "cases": [asdict(case) for case in cases]}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


def _read(case: Mapping[str, Any]) -> dict[str, Any]:
    return {**case, "differences": tuple(case["differences"])}
