"""Part 8, its end: published runs as presets, what the planner predicts beside what was measured."""

from functools import lru_cache
from html import escape
from importlib.resources import as_file, files
from threading import Lock
from typing import NamedTuple

from phalanx.core.model import ModelShape
from phalanx.explore.asked import inputs_of
from phalanx.explore.draw import Curve, LogScale, Mark, Tick, plot
from phalanx.explore.inputs import Value, show_plain
from phalanx.explore.presets import ACCELERATORS, facts_of, models
from phalanx.explore.records import Panel, Picture, Record, Verdict, number, show
from phalanx.explore.state import Reading
from phalanx.planner.published.rows import PublishedRun, read_rows, read_run
from phalanx.planner.published.runs import Prediction, predict

FILE = "published.csv"  # written by tools/presets.py
PLAIN, GATED, ROUTED = "gpt-3-175b", "llama-3.1-8b", "deepseek-v3"  # what others are derived from
CLOSE = 0.10  # of an error that counts as right
_ONE_AT_A_TIME = Lock()


class Preset(NamedTuple):
    """A published run, and what we say about it.

    Attributes:
        run: the row as values.
        found: predicted beside published.
        source: with its commit or section, as the row has it.
        loads: the inputs that it stands for, as a link sets them.
    """

    run: PublishedRun
    found: Prediction
    source: str
    loads: str


def presets() -> tuple[Preset, ...]:
    """All published runs of the page; predicted once, which takes a third of a second."""
    with _ONE_AT_A_TIME:
        return _presets()


@lru_cache(maxsize=1)
def _presets() -> tuple[Preset, ...]:
    with as_file(files("phalanx.explore") / FILE) as path:
        rows = read_rows(path)
    runs = [read_run(row) for row in rows]
    return tuple(
        Preset(run, predict(row), row["source"], _loads(run))
        for run, row in zip(runs, rows, strict=True)
    )


def _loads(run: PublishedRun) -> str:
    """The inputs of a run: sizes where they differ from those of the model they are derived from."""
    device = run.cluster.accelerator
    chip = max((name for name in ACCELERATORS if device.name.startswith(name)), key=len)
    values: dict[str, Value] = {"model": _base_of(run.shape), "chip": chip, "M": device.memory}
    values |= facts_of(run.shape)
    values |= inputs_of(run.layouts[0])
    values |= {"B": run.batch * run.seq, "seq": run.seq, "pp": run.layouts[0].pp}
    return ";".join(f"{key}={show_plain(value)}" for key, value in values.items())


def _base_of(shape: ModelShape) -> str:
    facts = facts_of(shape)
    same = [model.name for model in models() if facts_of(model) == facts]
    if same:
        return same[0]
    if shape.is_moe:
        return ROUTED
    return PLAIN if shape.activation == "gelu" else GATED


def published(_state: Reading) -> Panel:
    """Predicted beside measured, whatever the state.

    Args:
        _state: is not read.
    """
    found = presets()
    errors = sorted(abs(one.found.time_error or 0.0) for one in found)
    middle, worst = errors[len(errors) // 2], errors[-1]
    verdict: Verdict = "good" if middle <= CLOSE else "bad"
    text = f"{show(middle, 'share')} off in the middle"
    records = (
        number("pub.count", len(found), "", source="benchmarks/published/runs_validate.csv"),
        number("pub.middle", middle, "share", formula="median of |predicted − measured| / measured",
               source="phalanx published"),
        number("pub.worst", worst, "share", formula="greatest |predicted − measured| / measured",
               source="phalanx published"),
        Record("pub.verdict", text, text, verdict=verdict, source="phalanx published",
               reason=f"the worst by {show(worst, 'share')}"),
    )  # fmt: skip
    return Panel(records, (_plot(found), _table(found)))


def _plot(found: tuple[Preset, ...]) -> Picture:
    """A dot for each run: measured to the right, predicted upwards; on the diagonal both agree."""
    seconds = [s for one in found for s in (one.found.seconds, one.found.published_seconds) if s]
    scale = LogScale(min(seconds) / 1.5, max(seconds) * 1.5)
    diagonal = Curve([(0.0, 0.0), (1.0, 1.0)], "network", "predicted = measured", dashed=True)
    dots = [
        Mark(
            scale.at(one.found.published_seconds or 1), "data", "", scale.at(one.found.seconds or 1)
        )
        for one in found
    ]
    ticks = [Tick(scale.at(value), f"{value:g} s") for value in (1.0, 10.0, 100.0)]
    drawn = plot([diagonal], dots, (ticks, ticks), ("measured seconds of a step", "predicted"))
    rows = [
        (one.run.id, show(one.found.published_seconds or 0, "s"), show(one.found.seconds or 0, "s"))
        for one in found
    ]
    return Picture("pub.plot", "seconds of a step, predicted beside measured", drawn,
                   ("run", "measured", "predicted"), rows)  # fmt: skip


def _table(found: tuple[Preset, ...]) -> Picture:
    heads = ("run", "measured", "predicted", "off", "80 %", "of", "chips", "layout")
    head = "".join(f'<th scope="col"{_kind(i)}>{name}</th>' for i, name in enumerate(heads))
    body = "".join(_row(one) for one in found)
    caption = "a click loads the model, the chips and the layout of a run into the page"
    table = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Published runs"><table class="load"><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    return Picture("pub.table", "published runs", table)


def _kind(place: int) -> str:
    return ' class="text"' if place in (5, 6, 7) else ""


def _row(one: Preset) -> str:
    run, found = one.run, one.found
    low, high = found.interval or (0.0, 0.0)
    error = found.time_error or 0.0
    within = low <= (found.published_seconds or 0.0) <= high
    name = f"{found.model} × {run.cluster.count:,}"
    line = " ".join(word for word in found.layout.split() if not word.startswith("stages="))
    query = escape(one.loads.replace(";", "&"))
    return (
        f'<tr><th scope="row"><a class="set" data-set="{escape(one.loads)}" href="?{query}">{escape(name)}</a></th>'
        f"<td>{show(found.published_seconds or 0, 's')}</td><td>{show(found.seconds or 0, 's')}</td>"
        f'<td><span class="v {"good" if within else "bad"}">{"+" if error > 0 else "−"}{show(abs(error), "share")}</span></td>'
        f"<td>{show(low, 's')} to {show(high, 's')}</td>"
        f'<td class="text" title="{escape(one.source)}">{escape(found.source)}</td><td class="text">{escape(run.cluster.accelerator.name)}</td>'
        f'<td class="text"><code>{escape(line)}</code></td></tr>'
    )
