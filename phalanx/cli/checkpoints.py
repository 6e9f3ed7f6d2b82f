"""List the checkpoints of a run, verify them, show what is inside, compare two.

phalanx checkpoints runs/demo
phalanx checkpoints runs/demo --verify
phalanx checkpoints runs/demo --show 100
phalanx checkpoints runs/demo --diff 100 200

The run may be training meanwhile: a checkpoint never changes, and can be copied away at any time.
"""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.table import format_argument, print_facts, print_table
from phalanx.core.units import show_bytes

if TYPE_CHECKING:
    from phalanx.api.checkpoints import CheckpointContents, CheckpointDifference, CheckpointList

DIFFERENT = 4


def arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes; the help text is the documentation."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--verify", action="store_true", help="read and hash every byte")
    what.add_argument("--show", metavar="STEP", help="what is inside one")
    what.add_argument("--diff", nargs=2, metavar=("A", "B"), help="how two differ: steps, or paths")
    format_argument(parser)


def run(args: Namespace) -> int:
    """Look at what is there, and print it; 4 if something is damaged, or two differ."""
    from phalanx.api.checkpoints import checkpoints, compare_checkpoints, show_checkpoint

    if args.show is not None:
        contents = show_checkpoint(args.run, args.show)
        if args.json:
            print(json.dumps(contents.to_dict()))
        else:
            _show_contents(contents, args.format)
        return 0
    if args.diff is not None:
        difference = compare_checkpoints(args.run, *args.diff)
        if args.json:
            print(json.dumps(difference.to_dict()))
        else:
            _show_difference(difference, args.format)
        return 0 if difference.equal else DIFFERENT
    found = checkpoints(args.run, verified=args.verify)
    if args.json:
        print(json.dumps(found.to_dict()))
    else:
        _show_list(found, args.format)
    return 0 if found.passed else DIFFERENT


def _show_list(found: "CheckpointList", form: str) -> None:
    words = {True: "intact", False: "damaged", None: "not looked at"}
    rows = [
        (
            f"{c.step:,}",
            show_bytes(c.bytes, binary=True),
            words[c.verified],
            c.layout or "-",
            c.problem or c.path,
        )
        for c in found.checkpoints
    ]
    if not rows:
        print(f"{found.directory} holds no checkpoint yet")
    else:
        print_table(("step", "size", "state", "layout", "where, or what is wrong"), rows, form)
    if found.set_aside and form == "table":
        print(f"set aside: {', '.join(found.set_aside)}")


def _show_contents(contents: "CheckpointContents", form: str) -> None:
    info, state = contents.info, contents.state
    schedule = state.get("schedule", {})
    print_facts(
        (
            ("checkpoint", info.path),
            ("step", f"{info.step:,}"),
            ("updates", f"{state.get('updates', '')}"),
            ("size", show_bytes(info.bytes, binary=True)),
            ("saved under", info.layout),
            ("text", str(state.get("corpus_name", ""))),
            ("data position", f"{contents.samples:,} sequences of {state.get('seq', '?')} tokens"),
            ("seed", str(state.get("seed", ""))),
            ("learning rate", f"{schedule.get('learning_rate', '')} over {schedule.get('steps')}"),
            ("loss scale", str(state.get("loss_scale", ["", ""])[0])),
        ),
        form,
    )
    if form == "table":
        print()
    rows = [
        (t.name, t.field, t.dtype, " x ".join(map(str, t.shape)) or "1", str(t.files))
        for t in contents.tensors
    ]
    print_table(("tensor", "field", "dtype", "shape", "files"), rows, form)


def _show_difference(found: "CheckpointDifference", form: str) -> None:
    rows = [(key, str(was), str(now)) for key, (was, now) in found.state.items()]
    if rows:
        print_table(("state", found.first.path, found.second.path), rows, form)
    if found.equal:
        print(f"all {found.compared} tensors are equal, bit for bit")
        return
    changes = [
        (
            change.name,
            change.field,
            change.difference or f"{change.changed:,} of {change.elements:,}",
            "-" if change.max_difference is None else f"{change.max_difference:.3g}",
        )
        for change in found.tensors
    ]
    print_table(("tensor", "field", "elements that differ", "by at most"), changes, form)
