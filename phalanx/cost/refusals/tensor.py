"""What the tensor axis refuses: heads that tp does not divide, widths smaller than tp."""

from collections.abc import Iterator

from phalanx.core.errors import divisors, shorten
from phalanx.core.model import ModelShape
from phalanx.core.run import Run
from phalanx.cost.refusals.rule import Rule, Scope, keys


def _widths(shape: ModelShape) -> Iterator[tuple[int, str]]:
    """What tp cuts unevenly where it must, but no finer than one."""
    yield shape.vocab, "a vocabulary"
    yield shape.ffn, "an MLP width"
    if shape.is_moe:
        yield shape.expert_width, "an expert's width"


def _says_heads(run: Run) -> str:
    heads = run.model.heads
    return (
        f"{heads} heads cannot be split over tp={run.layout.tp}; "
        f"tp can be {shorten(divisors(heads))}"
    )


def _says_kv_heads(run: Run) -> str:
    shape, tp = run.model, run.layout.tp
    fits = [t for t in divisors(shape.heads) if not shape.kv_heads % t or not t % shape.kv_heads]
    return (
        f"{shape.kv_heads} kv heads cannot be split over, or shared by, tp={tp}; "
        f"tp can be {shorten(fits)}"
    )


def _says_width(run: Run) -> str:
    tp = run.layout.tp
    size, what = next((size, what) for size, what in _widths(run.model) if size < tp)
    return f"{what} of {size} is smaller than tp={tp}; use a smaller tp"


RULES = (
    Rule(
        "tp does not divide the heads",
        keys("tp"),
        lambda x: x.model.heads % x.tp != 0,
        _says_heads,
    ),
    Rule(
        "tp and the kv heads do not divide each other",
        keys("tp"),
        lambda x: (x.model.kv_heads % x.tp != 0) & (x.tp % x.model.kv_heads != 0),
        _says_kv_heads,
        Scope.OURS,
    ),
    Rule(
        "tp is more than a width has channels",
        keys("tp"),
        lambda x: x.tp > min(size for size, _ in _widths(x.model)),
        _says_width,
        Scope.OURS,
    ),
)
