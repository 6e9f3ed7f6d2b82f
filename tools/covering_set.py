"""Writes phalanx/oracle/covering_set.txt: cases that let every feature meet every size.

Takes some minutes. Run it when a feature is new; `tests/oracle/test_covering.py` says so.
"""

from argparse import ArgumentParser
from pathlib import Path

from phalanx.oracle.cases import write_case
from phalanx.oracle.covering import candidates, choose

HEAD = """\
# Written by tools/covering_set.py: layout | features | which targets count | what else differs.
"""

if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=4000, help="cases to choose from")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    alone = choose(candidates(args.count // 20, args.seed, max_ranks=1))
    chosen = [*alone, *choose(candidates(args.count, args.seed), alone)]
    lines = [write_case(spec) for spec in chosen]
    path = Path(__file__).parent.parent / "phalanx" / "oracle" / "covering_set.txt"
    path.write_text(HEAD + "\n".join(lines) + "\n")
