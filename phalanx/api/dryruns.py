"""The dry run from Python: `phalanx.dry_run` rehearses ranks of a job that nobody has yet."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from phalanx.api.names import ClusterLike, LayoutLike, ModelLike, RunLike, run_of
from phalanx.api.planning import estimate_request
from phalanx.core.errors import UsageError, require_type, require_whole
from phalanx.core.html import html_table
from phalanx.core.layout import Layout
from phalanx.core.run import Recipe, Run
from phalanx.core.units import show_bytes
from phalanx.cost.refusals import refuse
from phalanx.dryrun.compare import RankCase, Rehearsed
from phalanx.schedules.layouts import is_asynchronous

SCHEMA = 1
Ranks = int | Sequence[int] | Literal["kinds"]


@dataclass(frozen=True)
class DryRun:
    """What some ranks of a run did, without the others, and what was planned.

    Attributes:
        run: what was rehearsed.
        cases: rank after rank.

    Example:
        >>> import phalanx
        >>> found = phalanx.dry_run({"model": "gpt2", "layout": "tp=4", "recipe": {"seq": 64}})
        >>> found.cases[0].messages_equal
        True
    """

    run: Run
    cases: tuple[RankCase, ...]

    @property
    def passed(self) -> bool:
        """Whether every rank sent and held what was planned."""
        return all(case.passed for case in self.cases)

    def to_dict(self) -> dict[str, Any]:
        """The document that `phalanx dryrun --json` prints."""
        return {
            "schema": SCHEMA,
            "layout": str(self.run.layout),
            "ranks": self.run.layout.ranks,
            "passed": self.passed,
            "cases": [case.to_dict() for case in self.cases],
        }

    def _repr_html_(self) -> str:
        """The ranks as a table, for a notebook."""
        rows = [
            (
                case.rank,
                "as planned" if case.passed else "; ".join(case.differences[:2]),
                show_bytes(case.rehearsed.peak_bytes, binary=True),
                show_bytes(case.planned_peak_bytes, binary=True),
                len(case.rehearsed.messages),
            )
            for case in self.cases
        ]
        heads = ("rank", "verdict", "peak", "planned peak", "kinds of messages")
        return html_table(str(self.run.layout), rows, heads)


def dry_run(run: RunLike, *, ranks: Ranks = 0) -> DryRun:
    """Take one step as some ranks of a job of any size, and compare with the plan.

    The trainer itself runs, on tensors that have shapes and no values; other ranks are made up. So
    a rank of 16,384 costs what one of 16 does: seconds, and no memory to speak of.

    Args:
        run: a run file, its tables or a `Run`; its layout may have any number of ranks.
        ranks: one, several, or "kinds" for one of every kind.

    Returns:
        What every rank sent and held; `passed` says whether it is what was planned.

    Raises:
        UsageError: nobody knows a name, or there is no such rank.
        RefusedError: the trainer cannot cut it so, or it cannot be rehearsed.

    Example:
        >>> import phalanx
        >>> job = {"model": "gpt2", "layout": "dp=8 pp=4 tp=2", "recipe": {"seq": 256}}
        >>> phalanx.dry_run(job, ranks=63).passed
        True
    """
    return rehearse_ranks(run_of(run), ranks)


def run_of_job(
    model: ModelLike,
    cluster: ClusterLike,
    layout: LayoutLike,
    step: tuple[str | None, int | None],
    seq: int,
) -> Run:
    """The run that a model, a cluster and a layout make.

    Args:
        model: a catalog name, a `.toml` file, a table of sizes or a `ModelShape`.
        cluster: `h100x16384`, a catalog name, a `.toml` file or a `Cluster`.
        layout: a line, a table of keys or a `Layout`; without dp, it takes what the other axes
            leave of the devices.
        step: tokens of one step, or its sequences; the other is None.
        seq: tokens per sequence.

    Raises:
        UsageError: nobody knows a name, or a number cannot be.
        RefusedError: the layout is for another number of devices.
    """
    request, asked = estimate_request(model, cluster, layout, step, seq, "phalanx")
    clip = 0.0 if is_asynchronous(asked) else 1.0
    recipe = Recipe(seq=request.seq, batch=request.batch, clip=clip)
    return Run(model=request.shape, layout=asked, recipe=recipe)


def rehearse_ranks(
    run: Run, ranks: Ranks, on_case: Callable[[int, int, RankCase], None] = lambda *_: None
) -> DryRun:
    """Rehearse ranks, one after the other.

    Args:
        run: precision "auto" is bf16, as on a GPU.
        ranks: one, several, or "kinds" for one of every kind.
        on_case: is told of each as it comes: its number from 1, how many there are, and itself.

    Raises:
        UsageError: there is no such rank.
        RefusedError: the trainer cannot cut it so, or it cannot be rehearsed.
    """
    run = replace(run, layout=replace(run.layout, precision=run.layout.precision.on("bf16")))
    refuse(run)
    rehearsed = Rehearsed(run)
    wanted = rehearsed.kinds if ranks == "kinds" else _listed(ranks, run.layout)
    cases = []
    for number, rank in enumerate(wanted, 1):
        cases.append(rehearsed.case(rank))
        on_case(number, len(wanted), cases[-1])
    return DryRun(run, tuple(cases))


def _listed(ranks: int | Sequence[int], layout: Layout) -> tuple[int, ...]:
    require_type("ranks", ranks, (int, list, tuple, range), 'a rank, several, or "kinds"')
    wanted = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    for rank in wanted:
        require_whole("rank", rank)
        if not 0 <= rank < layout.ranks:
            raise UsageError(f"rank is {rank}; {layout} has ranks 0 to {layout.ranks - 1}")
    return wanted
