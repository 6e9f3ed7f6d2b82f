"""Searches layouts in a process of its own, so that the page moves on and a search can be ended.

The process reads the query of a state from its standard input and writes one JSON document.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from html import escape
from typing import Any

from phalanx.api.plans import Plan, plan
from phalanx.core.cluster import Cluster
from phalanx.core.errors import PhalanxError
from phalanx.core.layout import Layout
from phalanx.core.units import show_bytes, show_rate, show_seconds, show_share
from phalanx.explore.asked import cluster_of, inputs_of, shape_of
from phalanx.explore.draw import Bar, BarPiece, bars
from phalanx.explore.inputs import show_plain
from phalanx.explore.state import Reading, State

BEAT = 0.2  # seconds between two signs of life
SHOWN_REASONS = 3


def main() -> int:
    """Search for the state on standard input; one document on standard output."""
    sys.stdout.write(json.dumps(found_by(sys.stdin.read())))
    return 0


def found_by(query: str) -> dict[str, str]:
    """The ranking that a page shows, under `html`; or why there is none, under `error`.

    Args:
        query: of the state.
    """
    try:
        return {"html": ranking(searched(State.parse(query)))}
    except PhalanxError as error:
        return {"error": str(error)}
    except Exception as error:  # a mistake of ours is told too: the page would wait for ever
        kind = type(error).__name__
        return {"error": f"the search failed ({kind}: {error}); this is a fault of ours"}


def searched(state: State) -> Plan:
    """The search that a state asks for.

    Args:
        state: of the page.

    Raises:
        PhalanxError: nothing fits, or the question is wrong.
    """
    reading = Reading(state)
    seq = reading.whole("seq")
    batch = max(round(reading.number("B") / seq), 1)
    fixed = reading.text("fixed")
    found = plan(shape_of(reading), cluster_of(reading), batch=batch, seq=seq, fixed=fixed)
    why = reading.text("whynot")
    return found.asking(why) if why.strip() else found


def load_text(layout: str) -> str:
    """The inputs of a layout, as a link that loads it sets them.

    Args:
        layout: a line.
    """
    values = inputs_of(Layout.parse(layout))
    return ";".join(f"{key}={show_plain(value)}" for key, value in values.items())


def ranking(found: Plan) -> str:
    """The ranked layouts as rows that can be loaded, with why; then the question, and what was refused.

    Args:
        found: the plan.
    """
    document = found.to_dict()
    rows = "".join(_row(one, document) for one in document["layouts"])
    best = document["layouts"][0]
    refused = sorted(document["refused"].items(), key=lambda item: -item[1])
    reasons = "".join(f"<li>{count:,} {escape(reason)}</li>" for reason, count in refused)
    heading = (
        f"{document['candidates']:,} layouts divide the {document['devices']:,} chips and the batch; "
        f"{document['feasible']:,} fit. Searched in {document['seconds']:.1f} s."
    )
    winner = (
        f'<div class="best"><h4>The fastest</h4><p><code>{escape(best["layout"])}</code><br>{in_words(best["layout"])}.</p><p>'
        f"{show_seconds(best['step_seconds'])} a step, MFU {show_share(best['mfu'])}, {show_bytes(best['peak_bytes'])} of "
        f"{show_bytes(document['capacity_bytes'])}; it spends most on {escape('; '.join(best['reasons'][:2]))}.</p>{_load(best['layout'])}</div>"
    )
    return (
        f'<p>{heading}</p>{winner}{_why(document, found.request.cluster)}<div class="scroll"><table class="ranking"><caption>the best layout of each mesh, fastest '
        'first</caption><thead><tr><th scope="col">#</th><th scope="col" class="text">layout</th><th scope="col">step</th>'
        '<th scope="col">MFU</th><th scope="col">memory</th><th scope="col" class="text">why</th><th></th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{_terms(best)}{_textbook(document)}"
        f"<details><summary>What was refused</summary><ul>{reasons}</ul></details>"
        + "".join(f'<p class="fine">{escape(note)}</p>' for note in document["notes"])
    )


def _row(one: dict[str, Any], document: dict[str, Any]) -> str:
    why = "; ".join(one["reasons"][:SHOWN_REASONS])
    line = " ".join(word for word in one["layout"].split() if not word.startswith("precision="))
    share = one["peak_bytes"] / document["capacity_bytes"]
    return (
        f'<tr><td>{one["rank"]:,}</td><td class="text"><code>{escape(line)}</code></td><td>{show_seconds(one["step_seconds"])}</td>'
        f'<td>{show_share(one["mfu"])}</td><td>{show_bytes(one["peak_bytes"])} <span class="quiet">{share:.0%}</span></td>'
        f'<td class="wrap">{escape(why)}</td><td>{_load(one["layout"])}</td></tr>'
    )


def _load(layout: str) -> str:
    return f'<button type="button" class="try" data-set="{escape(load_text(layout))}">Load</button>'


def in_words(line: str) -> str:
    """How a layout cuts a step, for who does not read its keys.

    Args:
        line: the layout.

    Example:
        >>> in_words("dp=16 pp=8 tp=4 zero=1")
        '16 replicas, each cut 4 ways inside its layers and into 8 stages of layers'
    """
    layout = Layout.parse(line)
    cuts = [
        f"{layout.tp} ways inside its layers" if layout.tp > 1 else "",
        f"into {layout.pp} stages of layers" if layout.pp > 1 else "",
        f"into {layout.cp} parts of each sequence" if layout.cp > 1 else "",
    ]
    cut = " and ".join(filter(None, cuts))
    count = "1 replica" if layout.dp == 1 else f"{layout.dp:,} replicas"
    each = f", {'each ' * (layout.dp > 1)}cut {cut}" if cut else ", cut no further"
    shared = layout.dp > 1 and layout.zero == 3
    among = (
        f"; {layout.shard or layout.dp:,} of them share their weights (ZeRO-3)" if shared else ""
    )
    return f"{count}{each}{among}"


def _crossing(line: str, cluster: Cluster) -> str:
    """What tensor parallelism wider than the fast fabric means."""
    tp, domain = Layout.parse(line).tp, cluster.domain
    if domain.axes or tp <= domain.size:
        return ""
    fast, slow = domain.link.bandwidth, cluster.accelerator.network.bandwidth
    return (
        f" {tp} tensor-parallel ranks do not fit into one domain of {domain.size} chips, so what they send in every layer "
        f"leaves it: {show_rate(slow, 'B')} instead of {show_rate(fast, 'B')} for each chip."
    )


def _why(document: dict[str, Any], cluster: Cluster) -> str:
    """Why not the layout that was asked about."""
    asked, best = document["why"], document["layouts"][0]
    if asked is None:
        return ""
    title = f"Why not <code>{escape(asked['request'])}</code>?"
    if asked["refused"]:
        fix = asked["suggested"]
        remedy = f" With {escape(str(fix['changes']))} it would." if fix else ""
        return (
            f'<div class="answer"><h4>{title}</h4><p>{escape(asked["refused"])}.{remedy}</p></div>'
        )
    slower = asked["step_seconds"] / best["step_seconds"] - 1
    parts = sorted(asked["difference_seconds"].items(), key=lambda item: -abs(item[1]))[:4]
    listed = "".join(
        f"<li>{'+' if s > 0 else '−'}{show_seconds(abs(s))} {escape(n)}</li>" for n, s in parts
    )
    fits = (
        "fits"
        if asked["fits"]
        else f"does not fit: {show_bytes(asked['peak_bytes'])} of {show_bytes(document['capacity_bytes'])}"
    )
    return (
        f'<div class="answer"><h4>{title}</h4><p>The fastest such layout is <code>{escape(asked["layout"])}</code>. It {fits}, takes '
        f"{show_seconds(asked['step_seconds'])} a step, {slower:.0%} longer than the best, and has rank {asked['rank'] or '—'}.{_crossing(asked['layout'], cluster)} The difference:</p>"
        f"<ul>{listed}</ul>{_load(asked['layout'])}</div>"
    )


def _terms(best: dict[str, Any]) -> str:
    longest = max(best["term_seconds"].values())
    rows = [
        Bar(name, [BarPiece(seconds / longest, "compute")], show_seconds(seconds))
        for name, seconds in sorted(best["term_seconds"].items(), key=lambda item: -item[1])[:8]
    ]
    return f"<h4>Where the {show_seconds(best['step_seconds'])} of the best go</h4>{bars(rows)}"


def _textbook(document: dict[str, Any]) -> str:
    plain = document["heuristic"]
    if "refused" in plain:
        return f'<p class="fine">The textbook&#x27;s procedure has no layout here: {escape(plain["refused"])}.</p>'
    return (
        f'<p class="fine">The textbook&#x27;s procedure would take <code>{escape(plain["layout"])}</code>: '
        f"{show_seconds(plain['step_seconds'])} a step. {_load(plain['layout'])}</p>"
    )


async def search_lines(query: str) -> AsyncIterator[str]:
    """Signs of life, then the result, one JSON object to a line; leaving early ends the search.

    Args:
        query: of the state.
    """
    begun = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "phalanx.explore.searching",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    answer = asyncio.ensure_future(process.communicate(query.encode()))
    try:
        while True:
            done, _ = await asyncio.wait([answer], timeout=BEAT)
            if done:
                break
            yield json.dumps({"seconds": round(time.monotonic() - begun, 1)}) + "\n"
        output, _ = answer.result()
        yield (
            output.decode() or json.dumps({"error": "the search ended without an answer"})
        ) + "\n"
    finally:
        if process.returncode is None:
            process.kill()
        answer.cancel()


if __name__ == "__main__":
    raise SystemExit(main())
