"""What does it cost to be watched, and how soon is a run back at work after a rank was killed?

    python benchmarks/watching.py            the cost of beats, and of points without a plan
    python benchmarks/watching.py --kills 5  also kills of four local ranks, one after the other

The cost of a beat is the CPU time of many, in one process; a step of 100 ms with so many actions
and messages as a rank of the demo has then pays the share that is printed. Back at work means:
from the kill until the launcher acted (noticed), and from then until the next step was done (back).
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import phalanx
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe, Run
from phalanx.trainer import faults
from phalanx.trainer.run.heartbeat import Heartbeat

ROUNDS, CALLS = 7, 20_000
STEP_SECONDS, ACTIONS, MESSAGES = 0.1, 100, 200  # of a rank with many micro-batches
RUN = Run(
    model=ModelShape(layers=2, hidden=64, heads=4),
    layout=Layout.parse("dp=2 tp=2"),
    recipe=Recipe(seq=64, batch=4, steps=50, warmup=2, evaluate_batches=1),
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=0, help="of ranks, at random instants")
    args = parser.parse_args()
    show_costs()
    if args.kills:
        show_kills(args.kills)


def show_costs() -> None:
    """CPU time of a beat and of a point, and their share of a step."""
    with tempfile.TemporaryDirectory() as folder:
        heart = Heartbeat(Path(folder), 0)

        def message() -> None:
            heart.waits("tensor", "activations")
            heart.arrived()

        action, wait = cpu_seconds(lambda: heart.doing("0F3")), cpu_seconds(message)
        point = cpu_seconds(lambda: faults.point("message", purpose="gradients"))
        heart.close()
    share = (ACTIONS * action + MESSAGES * (wait + point)) / STEP_SECONDS
    print(f"a beat for an action   {action * 1e9:6.0f} ns")
    print(f"beats for a message    {wait * 1e9:6.0f} ns")
    print(f"a point, no plan       {point * 1e9:6.0f} ns   (bar: 100 ns)")
    print(
        f"watching               {share:6.2%} of a step of {STEP_SECONDS * 1e3:.0f} ms with "
        f"{ACTIONS} actions and {MESSAGES} messages   (bar: 1 %)"
    )


def cpu_seconds(call: Callable[[], object]) -> float:
    """Least CPU time of one call over some rounds, the loop around it taken away."""

    def rounds(each: Callable[[], object]) -> float:
        times = []
        for _ in range(ROUNDS):
            start = time.process_time()
            for _ in range(CALLS):
                each()
            times.append(time.process_time() - start)
        return min(times) / CALLS

    return rounds(call) - rounds(lambda: None)


def show_kills(count: int) -> None:
    """How soon a run of four ranks goes on, and whether it came to the same bits."""
    report = phalanx.drill(RUN, faults=["random"], kills=count, steps=20)
    noticed = [case.noticed_seconds or 0.0 for case in report.cases]
    back = [
        case.noticed_seconds + case.back_seconds
        for case in report.cases
        if case.noticed_seconds is not None and case.back_seconds is not None
    ]
    print(f"noticed                {statistics.median(noticed):6.2f} s, worst {max(noticed):.2f} s")
    print(f"back at work           {statistics.median(back):6.2f} s, worst {max(back):.2f} s")
    print(f"equal                  {sum(case.equal for case in report.cases)} of {count}")


if __name__ == "__main__":
    main()
