"""Writes run directories as a run leaves them, hostile ones too."""

import json
from pathlib import Path

HOSTILE = "<script>alert(1)</script>"
LAYOUT = "dp=1 pp=2 tp=1"


def step(number: int, loss: float) -> dict[str, object]:
    """One line of metrics."""
    return {
        "step": number, "loss": loss, "seconds": 0.5, "tokens_per_second": 4096.0,
        "mfu": 0.4, "hfu": 0.5,
        "data_wait_seconds": 0.01, "exposed_seconds": {"pipeline": 0.1}, "peak_bytes": 10**9,
        "validation_loss": loss + 0.1 if number % 2 else None,
    }  # fmt: skip


def span(rank: int, name: str, start: float, lasts: float) -> dict[str, object]:
    """One event of a Chrome trace, in microseconds."""
    return {"ph": "X", "pid": rank, "tid": 0, "name": name, "ts": start, "dur": lasts}


def write_run(folder: Path, steps: int = 4, text: str = "step 0 of 4") -> Path:
    """A run directory with metrics, events, a timeline and a summary."""
    folder.mkdir(parents=True)
    lines = [json.dumps(step(n, 5.0 - n)) for n in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    event = {"time": 1.0, "kind": "start", "step": 0, "rank": None, "text": text, "data": {}}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    spans = [span(0, "0F0", 0, 100), span(1, "1F0", 100, 100), span(1, "1B0", 200, 200)]
    (folder / "timeline.json").write_text(
        json.dumps({"traceEvents": [*spans, span(0, "0B0", 400, 200)]})
    )
    (folder / "summary.json").write_text(json.dumps({"layout": LAYOUT}))
    return folder
