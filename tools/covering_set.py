"""Writes phalanx/oracle/covering_set.txt: cases that let every feature meet every size.

What meets in the present set goes on to meet. Takes some minutes for each turn, after which the set
is whole, so that it may be stopped. Run it when a feature is new; `tests/oracle/test_covering.py`
says so.
"""

from argparse import ArgumentParser
from collections.abc import Iterable
from pathlib import Path

from phalanx.core.layout import Layout
from phalanx.oracle.cases import CaseSpec, covering_set, write_case
from phalanx.oracle.cheaper import cheaper
from phalanx.oracle.covering import candidates, choose, cost

HEAD = """\
# Written by tools/covering_set.py: layout | features | which targets count | what else differs.
"""


PATH = Path(__file__).parent.parent / "phalanx" / "oracle" / "covering_set.txt"
ROUNDS = 20  # before the set is written again


def on_one_rank(spec: CaseSpec) -> bool:
    """Whether anyone can run it, with no other process."""
    return Layout.parse(spec.layout).ranks == 1


def write(specs: Iterable[CaseSpec]) -> None:
    """Make these the covering set."""
    PATH.write_text(HEAD + "\n".join(map(write_case, specs)) + "\n")


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=4000, help="cases to choose from")
    parser.add_argument("--turns", type=int, default=20, help=f"of {ROUNDS} rounds, to get cheaper")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    present = covering_set()
    few = [*filter(on_one_rank, present), *candidates(args.count // 20, args.seed, max_ranks=1)]
    alone = cheaper(choose(few), ROUNDS, seed=args.seed)
    chosen = choose([*present, *candidates(args.count, args.seed)], alone)
    write([*alone, *chosen])
    for turn in range(args.turns):
        chosen = cheaper(chosen, ROUNDS, alone, seed=args.seed + turn)
        write([*alone, *chosen])
        print(f"{len(chosen) + len(alone)} cases, about {sum(map(cost, chosen)):.0f} s")
