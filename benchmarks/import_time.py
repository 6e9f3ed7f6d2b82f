"""What `import phalanx` costs, and each public name when it is first used.

    python benchmarks/import_time.py [--json]

CPU milliseconds of a fresh interpreter beyond a bare one, the least of several tries, so that a
busy machine counts little.
"""

import argparse
import json
import resource
import subprocess
import sys

TRIES = 9
STATEMENTS = {
    "import phalanx": "import phalanx",
    "phalanx.Layout": "import phalanx; phalanx.Layout",
    "phalanx.schedule": "import phalanx; phalanx.schedule",
    "phalanx.estimate": "import phalanx; phalanx.estimate",
    "phalanx.plan": "import phalanx; phalanx.plan",
    "phalanx.verify (torch)": "import phalanx; phalanx.verify",
}


def cpu_milliseconds(code: str) -> float:
    """The least CPU time of a fresh interpreter that runs `code`."""
    times = []
    for _ in range(TRIES):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return 1e3 * min(times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    bare = cpu_milliseconds("pass")
    found = {name: cpu_milliseconds(code) - bare for name, code in STATEMENTS.items()}
    if args.json:
        print(json.dumps({"schema": 1, "bare_milliseconds": bare, "milliseconds": found}))
        return
    print(f"a bare interpreter: {bare:.0f} ms")
    for name, milliseconds in found.items():
        print(f"{name:24} {milliseconds:6.0f} ms more")


if __name__ == "__main__":
    main()
