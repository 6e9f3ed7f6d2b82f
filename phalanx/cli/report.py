"""Explain a run: where its time went, beside what was planned; or what changed between two.

phalanx report runs/NAME
phalanx report runs/NAME --html report.html      # one file, that asks nobody for anything
phalanx report runs/BEFORE runs/AFTER            # term by term, with the keys that differ

The folder may have been copied here, and the run may be training. --cluster says what it ran on
where the catalog does not know it.
"""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from phalanx.cli.table import format_argument


def arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes; the help text is the documentation."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "other", type=Path, nargs="?", metavar="RUN2", help="one to compare it with"
    )
    parser.add_argument("--cluster", help="the devices to plan it on: a name, or a .toml file")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page instead")
    format_argument(parser)


def run(args: Namespace) -> int:
    """Read what the run wrote, plan it, and print both."""
    # imported here, so that --help comes at once
    from phalanx.api.reports import compare_reports, report
    from phalanx.cli import report_screen as screen

    first = report(args.run, cluster=args.cluster)
    second = None if args.other is None else report(args.other, cluster=args.cluster)
    both = None if second is None else compare_reports(first, second)
    if args.html is not None:
        from phalanx.reports.page import difference_page, report_page

        page = report_page(first) if both is None else difference_page(both)
        args.html.write_text(page, encoding="utf-8")
    if args.json:
        print(json.dumps((both or first).to_dict(), allow_nan=False))
    elif args.html is not None:
        print(f"written: {args.html}")
    elif both is not None:
        screen.print_difference(both, args.format)
    else:
        screen.print_report(first, args.format)
    return 0
