"""Measures the explorer: from a drag to the painted frame, from opening to ready, and what is sent.

A real server and a real Chromium on this machine. Scrubbing: one step in every frame, each to a
value that was not there before, timed from the step to the first frame after its numbers stand in
the document. A frame is 16.7 ms, so nothing is faster. Beside it stand the milliseconds of CPU that
the server and the page's main thread took for one step, and all processes of the browser together:
they mean something on a busy machine too; the waits do not. Run it on a quiet one:

    python benchmarks/explorer.py --json
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from playwright.sync_api import CDPSession, Page, sync_playwright

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
BARS = {"scrub_p50_ms": 17.0, "scrub_p95_ms": 25.0, "ready_ms": 1000.0, "page_kb": 200.0}
CASES = {
    "data parallelism": ("", "data", "B"),
    "roofline": ("", "clocks", "B"),
    "mixed": ("v1&chip=tpu-v5p&dp=256&tp=16&pp=1", "mixed", "F"),
    "systems": ("", "systems", "B"),
    "pipeline, 4 x 8 on": ("", "pipeline", "m"),
    "pipeline, 16 x 64 on": ("v1&p=16&m=64", "pipeline", "m"),
    "pipeline, 16 x 256": ("v1&p=16&m=256&F_=0.25", "pipeline", "F_"),
}
THREAD = "ThreadTime"  # seconds of CPU of the page's main thread

# From a step to the frame that shows it: what a hand on the number would see.
SCRUB = """
async ([key, moves]) => {
  const find = (where) => document.querySelector(`${where}.scrub[data-k=${key}]`);
  const scrub = find(".top ") || find("");
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  const once = { once: true };
  const reply = () => new Promise((done) => document.addEventListener("phalanx:reply", done, once));
  const times = [];
  scrub.focus({ preventScroll: true });
  for (let move = 0; move < moves; move += 1) {
    await frame();
    const begun = performance.now(), answered = reply();
    const arrow = move < moves / 2 ? "ArrowUp" : "ArrowDown";
    scrub.dispatchEvent(new KeyboardEvent("keydown", { key: arrow, bubbles: true }));
    await answered;
    await frame();
    times.push(performance.now() - begun);
  }
  return times;
}
"""


# Bytes of scripts, styles and icons, and those of the document, which has all the data.
SIZES = """
() => {
  const all = performance.getEntriesByType("resource").filter((r) => r.name.includes("/static/"));
  const page = performance.getEntriesByType("navigation")[0].decodedBodySize;
  return [all.reduce((sum, r) => sum + r.decodedBodySize, 0), page];
}
"""


def free_port() -> int:
    """A port that nobody has."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def percentile(values: list[float], share: float) -> float:
    """The value below which so many lie."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def measure(page: Page, address: str, moves: int, server: int) -> dict[str, object]:
    """All cases, one after the other."""
    begun = time.perf_counter()
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    ready = 1000 * (time.perf_counter() - begun)
    page.wait_for_timeout(1000)
    sizes = page.evaluate(SIZES)
    cases = {
        name: scrubbed(page, f"{address}?{query}#{part}", key, (moves, server))
        for name, (query, part, key) in CASES.items()
    }
    return {
        "ready_ms": ready,
        "page_kb": sizes[False] / 1000,
        "data_kb": sizes[True] / 1000,
        "cases": cases,
        "bars": BARS,
    }


def scrubbed(page: Page, where: str, key: str, how: tuple[int, int]) -> dict[str, float]:
    """One case: the times of its frames, and what server and page computed for one."""
    moves, server = how
    page.goto("about:blank")
    page.goto(where)
    page.wait_for_selector("body[data-ready]")
    page.wait_for_timeout(1500)
    asked = page.context.new_cdp_session(page)
    asked.send("Performance.enable")
    spent = [cpu_seconds(server), page_seconds(asked), browser_seconds()]
    times = page.evaluate(SCRUB, [key, moves])[: moves // 2]  # up; the way down was there before
    now = [cpu_seconds(server), page_seconds(asked), browser_seconds()]
    own, main, all_of_it = (
        1000 * (after - before) / moves for before, after in zip(spent, now, strict=True)
    )
    return {
        "p50_ms": statistics.median(times),
        "p95_ms": percentile(times, 0.95),
        "server_cpu_ms": own,
        "page_cpu_ms": main,
        "browser_cpu_ms": all_of_it,
    }


def cpu_seconds(process: int) -> float:
    """What a process has computed so far, its system calls included (Linux)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def browser_seconds() -> float:
    """What all processes below this one but Python's have computed so far."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            head, _, rest = stat.read_text().rpartition(")")
            parents[int(stat.parent.name)] = (int(rest.split()[1]), "chrom" in head)
    own = {os.getpid()}
    while more := {one for one, (parent, _) in parents.items() if parent in own} - own:
        own |= more
    found = 0.0
    for one in own:
        with suppress(OSError):
            found += cpu_seconds(one) if parents.get(one, (0, False))[1] else 0.0
    return found


def page_seconds(asked: CDPSession) -> float:
    """What the main thread of the page has computed so far."""
    found = asked.send("Performance.getMetrics")["metrics"]
    return float(next(one["value"] for one in found if one["name"] == THREAD))


def main() -> int:
    """Measure, print, and say whether the bars hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moves", type=int, default=120)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None:
        sys.exit("no Chromium here: apt-get install chromium")
    port = free_port()
    command = [sys.executable, "-m", "phalanx", "explore", "--no-browser", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        time.sleep(0.5)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            found = measure(page, address, args.moves, server.pid)
            browser.close()
        server.terminate()
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    print(f"ready {found['ready_ms']:.0f} ms (bar 1000)")
    print(f"{found['page_kb']:.0f} kB before data (bar 200), {found['data_kb']:.0f} kB with it")
    for name, case in found["cases"].items():  # type: ignore[attr-defined]
        p50, p95 = case["p50_ms"], case["p95_ms"]
        busy = (
            f"server {case['server_cpu_ms']:4.1f}, page {case['page_cpu_ms']:4.1f} ms of CPU a step"
        )
        print(f"{name:20} p50 {p50:5.1f} ms (bar 17)  p95 {p95:5.1f} ms (bar 25)  {busy}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
