"""Measures the explorer: from a drag to the painted frame, from opening to ready, and what is sent.

A real server and a real Chromium on this machine. Scrubbing: one step in every frame, timed from
the step to the first frame after its numbers stand in the document. Run it on a quiet machine:

    python benchmarks/explorer.py --json
"""

import argparse
import json
import shutil
import socket
import statistics
import subprocess
import sys
import time

from playwright.sync_api import Page, sync_playwright

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
BARS = {"scrub_p50_ms": 17.0, "scrub_p95_ms": 25.0, "ready_ms": 1000.0, "page_kb": 200.0}
CASES = {
    "data parallelism": ("", "data", "dp"),
    "roofline": ("", "clocks", "B"),
    "mixed": ("v1&chip=tpu-v5p&dp=256&tp=16&pp=1", "mixed", "F"),
    "pipeline, 4 x 8": ("", "pipeline", "m"),
}

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
    const arrow = (move >> 2) % 2 === 0 ? "ArrowUp" : "ArrowDown";
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


def measure(page: Page, address: str, moves: int) -> dict[str, object]:
    """All cases, one after the other."""
    begun = time.perf_counter()
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    ready = 1000 * (time.perf_counter() - begun)
    page.wait_for_timeout(1000)
    sizes = page.evaluate(SIZES)
    cases = {}
    for name, (query, part, key) in CASES.items():
        page.goto(f"{address}?{query}#{part}")
        page.wait_for_selector("body[data-ready]")
        page.wait_for_timeout(800)
        times = page.evaluate(SCRUB, [key, moves])[10:]
        cases[name] = {"p50_ms": statistics.median(times), "p95_ms": percentile(times, 0.95)}
    return {
        "ready_ms": ready,
        "page_kb": sizes[False] / 1000,
        "data_kb": sizes[True] / 1000,
        "cases": cases,
        "bars": BARS,
    }


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
            found = measure(page, address, args.moves)
            browser.close()
        server.terminate()
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    print(f"ready {found['ready_ms']:.0f} ms (bar 1000)")
    print(f"{found['page_kb']:.0f} kB before data (bar 200), {found['data_kb']:.0f} kB with it")
    for name, case in found["cases"].items():  # type: ignore[attr-defined]
        p50, p95 = case["p50_ms"], case["p95_ms"]
        print(f"{name:20} p50 {p50:5.1f} ms (bar 17)  p95 {p95:5.1f} ms (bar 25)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
