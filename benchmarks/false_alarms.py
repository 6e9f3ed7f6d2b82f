"""How often the oracle blames rounding: drawn layouts and models in low precision, all honest.

python benchmarks/false_alarms.py --count 200 --max-ranks 4 --seed 1

Every case is one that in fp64 equals one device, so each complaint is a false alarm. Beside their
number, how much of what is allowed the worst honest case used.
"""

from argparse import ArgumentParser
from collections import defaultdict

from phalanx.oracle.cases import CaseSpec, sample
from phalanx.oracle.pool import RankPool
from phalanx.oracle.verify import Outcome, verify

Changes = dict[str, dict[str, object]]

# What is drawn for, each as often as the others.
KINDS: dict[str, Changes] = {
    "bf16": {"layout": {"precision": "bf16"}},
    "fp16": {"layout": {"precision": "fp16"}},
    "bf16 alone": {
        "layout": {"precision": "bf16"},
        "recipe": {"master_weights": "stochastic", "moments": "bf16"},
    },
    "bf16, experts": {
        "layout": {"precision": "bf16"},
        "model": {"experts": 6, "top_k": 2, "moe_ffn": 40, "dense_layers": 1},
        "recipe": {"balance_loss": 0.02, "capacity": 1.25},
    },
    "fp16, experts": {
        "layout": {"precision": "fp16"},
        "model": {"experts": 6, "top_k": 2, "moe_ffn": 40, "dense_layers": 1},
        "recipe": {"balance_speed": 0.02},
    },
    "fp8": {"layout": {"precision": "fp8"}},
    "fp8-current": {"layout": {"precision": "fp8-current"}},
    "fp32": {"layout": {"precision": "fp32"}},
}


def drawn(count: int, max_ranks: int, seed: int) -> list[tuple[str, CaseSpec]]:
    """Cases of every kind in turn."""
    each = -(-count // len(KINDS))
    columns = [
        [(kind, spec) for spec in sample(each, max_ranks, seed + i, changes)]
        for i, (kind, changes) in enumerate(KINDS.items())
    ]
    return [pair for row in zip(*columns, strict=True) for pair in row][:count]


def main() -> None:
    """Draw, compare, count."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--max-ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    outcomes: dict[str, list[Outcome]] = defaultdict(list)
    with RankPool(args.max_ranks, print) as pool:
        for kind, spec in drawn(args.count, args.max_ranks, args.seed):
            outcome = verify(pool, spec.case())
            outcomes[kind].append(outcome)
            shares = "  ".join(f"{name} {share:4.2f}" for name, share in outcome.used.items())
            word = "ok   " if outcome.passed else "ALARM"
            layout = outcome.case.run.layout
            print(f"{word}  {shares}  {outcome.seconds:5.1f} s  {layout} | {spec.unusual}")
            for complaint in outcome.complaints[:3]:
                print(f"      {complaint}", flush=True)
    print(f"{'kind':16}{'cases':>6}{'alarms':>8}{'worst':>8}   of what is allowed")
    for kind, found in outcomes.items():
        alarms = sum(not outcome.passed for outcome in found)
        worst = max(max(outcome.used.values()) for outcome in found)
        print(f"{kind:16}{len(found):6}{alarms:8}{worst:8.2f}")
    total = [outcome for found in outcomes.values() for outcome in found]
    print(f"{sum(not outcome.passed for outcome in total)} false alarms in {len(total)} cases")


if __name__ == "__main__":
    main()
