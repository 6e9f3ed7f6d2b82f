"""Reads what accelerators are known to reach: files that `benchmarks/published/fit.py` writes."""

import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

from phalanx.core.sustained import Sustained

ROOT = Path(__file__).parent / "rates"
ASSUMED = "assumed"
_MICRO = 1e-6
_TERA = 1e12


@lru_cache(maxsize=64)
def sustained(accelerator: str) -> Sustained:
    """The set of an accelerator by its catalog name; the assumed one if nobody fitted it.

    Args:
        accelerator: a name and no alias; nobody is told where it is in no set.
    """
    for path in sorted(ROOT.glob("*.toml")):
        table = _read(path)
        if accelerator in table["accelerators"]:
            return _set(path.stem, table)
    return _set(ASSUMED, _read(ROOT / f"{ASSUMED}.toml"))


def _read(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return tomllib.load(file)


def _set(name: str, table: dict[str, Any]) -> Sustained:
    other = ("accelerators", "launch_us", "gap_us", "assumed_peak_tflops")
    values = {key: value for key, value in table.items() if key not in other}
    return Sustained(
        name=name,
        launch=_MICRO * table["launch_us"],
        gap=_MICRO * table.get("gap_us", 0.0),
        assumed_peak=_TERA * table.get("assumed_peak_tflops", 0.0),
        **values,
    )
