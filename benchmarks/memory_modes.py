"""What each way to save memory costs in time, and what it holds: beside none of them, in turns.

Bytes are those of tensors on the device at the worst moment of a step, as the planner says them;
tests/conformance/test_memory_modes.py holds them equal to what is measured. Host and disk are not
counted: on a CPU the host is the device itself, and only `offload=nvme` gives memory back.

python benchmarks/memory_modes.py [--rounds 5]
"""

import json

import torch
from measure import describe, options, race, run_of
from ours import Trainer
from rich.console import Console
from rich.table import Table

from phalanx.cost.memory import rank_memory

MODES = (
    "recompute=none",
    "recompute=selective",
    "recompute=norms+activation",
    "recompute=operators",
    "recompute=norms+mlp",
    "recompute=full",
    "recompute=full:3",
    "logits=1024",
    "logits=256",
    "offload=activations",
    "offload=optimizer",
    "offload=nvme",
    "recompute=full logits=256 offload=activations+nvme",
)


def main() -> None:
    """Measure and print."""
    args = options(__doc__, threads=1).parse_args()
    torch.set_num_threads(args.threads)
    runs = {mode: run_of(args, f"{mode} precision=fp32") for mode in MODES}
    results = race({mode: Trainer(run) for mode, run in runs.items()}, MODES[0], args.rounds)
    rows = [
        {
            "mode": r.name,
            "peak_bytes": rank_memory(run.model, run.layout, run.recipe.seq, 0, 1).allocated,
            "seconds": r.seconds,
            "wall_ratio": vars(r.wall),
            "cpu_ratio": vars(r.cpu),
        }
        for r, run in zip(results, runs.values(), strict=True)
    ]
    title = describe(runs[MODES[0]])
    if args.json:
        print(json.dumps({"schema": 1, "title": title, "results": rows}, indent=2))
        return
    table = Table(title=title, title_justify="left")
    for column in ("", "MB", "s/step", "x by CPU", "middle half"):
        table.add_column(column, justify="left" if not column else "right")
    for row, r in zip(rows, results, strict=True):
        numbers = f"{row['peak_bytes'] / 1e6:.0f}", f"{r.seconds:.2f}", f"{r.cpu.median:.2f}"
        table.add_row(r.name, *numbers, f"{r.cpu.low:.2f} - {r.cpu.high:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
