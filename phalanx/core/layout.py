"""How one training step is cut: degrees, ZeRO stage, schedule, micro-batching, precision.

A layout prints and parses as one line: `dp=2 pp=2 tp=2 zero=3 schedule=interleaved v=2`.
Ranks are numbered with tp fastest, then cp, pp, and dp outermost.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

from phalanx.core.errors import RefusedError, UsageError, divisors, require_whole, shorten
from phalanx.core.offload import STAYS, Offload
from phalanx.core.precision import AUTO, Precision
from phalanx.core.recompute import NONE, Recompute
from phalanx.core.synonyms import unknown_key

DEFAULT_SCHEDULE = "1f1b"
CONTEXTS = ("ring", "gather", "ulysses")


class Coordinates(NamedTuple):
    """Where a rank stands on each axis."""

    dp: int
    pp: int
    cp: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to cut a step over dp x pp x cp x tp ranks: what was asked, and nothing else.

    What follows from it is a property. So a layout keeps its meaning when one of its keys is
    changed by `dataclasses.replace`. Words may stand for the types of their keys.

    Example:
        >>> from dataclasses import replace
        >>> layout = Layout.parse("dp=2 pp=2 tp=2 zero=3")
        >>> layout.ranks, layout.coordinates(3)
        (8, Coordinates(dp=0, pp=1, cp=0, tp=1))
        >>> replace(Layout(tp=1), tp=2).sequence_parallel
        True

    Attributes:
        dp: data-parallel degree: ranks that see other sequences of the batch.
        pp: pipeline ranks: each holds other layers.
        tp: tensor-parallel degree: ranks that hold a part of every matrix.
        cp: context-parallel degree: ranks that share each sequence, and what zero shards.
        ep: expert-parallel degree: ranks, borrowed from dp x cp, that divide the experts of each
            layer among them; it is not a factor of the number of ranks.
        zero: what data-parallel ranks shard: 0 nothing, 1 optimizer, 2 gradients, 3 weights.
        shard: how many dp ranks share one sharded copy (HSDP); 0 means all of dp, see `shards`.
        v: chunks of layers per pipeline rank; 0 means as few as the schedule can have.
        schedule: the order of micro-batches over the pipeline: a name, the path of a CSV file with
            one line of actions per rank, or the `module:attribute` of a `ScheduleSpec`. Whether
            there is such a one, and what follows from it, is for `phalanx.schedules` to say.
        mb: sequences per micro-batch.
        stages: layers of each of the p v stages; empty means as even as possible. The first and
            the last may hold none, only the embedding or the head.
        recompute: which activations are computed again in backward.
        offload: what leaves the device between its uses.
        reshard: under zero=3, whether gathered weights are let go after forward; else they stay
            until the last backward of the step.
        logits: tokens whose logits are alive at once, in the loss; 0 means all, from forward to
            backward.
        precision: of the matrix products; "auto" is bf16 on GPU and fp32 on CPU.
        sp: split the regions that tp leaves whole along the sequence; None means where tp > 1,
            see `sequence_parallel`.
        compile: have torch.compile fuse the operations of each block.
        optimistic: move the weights before the global norm is known, and take it back where that
            says so.
        context: how queries meet the keys of other cp ranks: keys and values travel around a
            ring, are gathered, or ranks trade tokens for heads (ulysses).
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 1
    shard: int = 0
    v: int = 0
    schedule: str = DEFAULT_SCHEDULE
    mb: int = 1
    stages: tuple[int, ...] = ()
    recompute: Recompute = NONE
    offload: Offload = STAYS
    reshard: bool = True
    logits: int = 0
    precision: Precision = AUTO
    sp: bool | None = None
    compile: bool = False
    optimistic: bool = False
    context: str = "ring"

    def __post_init__(self) -> None:
        """Read words, and reject values that no model could make right."""
        for key, kind in _TYPES.items():
            value = getattr(self, key)
            if isinstance(value, str):
                object.__setattr__(self, key, kind.parse(value))
        for key in ("dp", "pp", "tp", "cp", "ep", "mb", "zero", "shard", "v", "logits"):
            require_whole(key, getattr(self, key))
        if not isinstance(self.schedule, str):
            raise UsageError(f"schedule is {self.schedule!r}; it is the name of one")
        for key in ("dp", "pp", "tp", "cp", "ep", "mb"):
            if getattr(self, key) < 1:
                raise UsageError(f"{key}={getattr(self, key)}; a degree is at least 1")
        for key in ("shard", "v"):
            if getattr(self, key) < 0:
                raise UsageError(f"{key}={getattr(self, key)}; it is at least 1, or 0 for default")
        _one_of("zero", self.zero, (0, 1, 2, 3))
        if not self.schedule:
            raise UsageError("schedule= has no name; leave it out, or name one as in schedule=1f1b")
        if self.logits < 0:
            raise UsageError(f"logits={self.logits}; it is a number of tokens, or 0 for all")
        _one_of("context", self.context, CONTEXTS)
        if self.dp % self.shards:
            raise RefusedError(
                f"shard={self.shard} does not divide dp={self.dp}; "
                f"shard can be {shorten(divisors(self.dp))}"
            )

    @property
    def shards(self) -> int:
        """How many dp ranks share one sharded copy: `shard`, or all of them."""
        return self.shard or self.dp

    @property
    def sequence_parallel(self) -> bool:
        """Whether the regions that tp leaves whole are split along the sequence."""
        return self.tp > 1 and self.sp is not False

    @property
    def ranks(self) -> int:
        """Number of processes: dp x pp x cp x tp."""
        return self.dp * self.pp * self.cp * self.tp

    @property
    def replicas(self) -> int:
        """Sharded copies of the model under HSDP: dp / shard."""
        return self.dp // self.shards

    @property
    def zero_stage(self) -> int:
        """What is really sharded: `zero`, or 0 where no two ranks share a copy."""
        return self.zero if self.sharers > 1 else 0

    @property
    def sharers(self) -> int:
        """Ranks that share one sharded copy: cp ranks hold the same weights as well."""
        return self.shards * self.cp

    @property
    def sequence_parts(self) -> int:
        """Into how many parts activations are cut along the sequence."""
        return self.cp * (self.tp if self.sequence_parallel else 1)

    def padded_seq(self, seq: int) -> int:
        """The length that ranks compute with: whole parts, and two chunks on each cp rank.

        Args:
            seq: tokens of a sequence.

        Example:
            >>> Layout(tp=4, cp=2).padded_seq(1000)
            1008
        """
        unit = self.sequence_parts * (2 if self.cp > 1 else 1)
        return -(-seq // unit) * unit

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands; the inverse of `rank_at`.

        Args:
            rank: 0 to `ranks` - 1; a larger one gets a dp that does not exist.
        """
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        dp, pp = divmod(rest, self.pp)
        return Coordinates(dp, pp, cp, tp)

    def rank_at(self, at: Coordinates) -> int:
        """The rank that stands at these coordinates."""
        return ((at.dp * self.pp + at.pp) * self.cp + at.cp) * self.tp + at.tp

    def micro_batches(self, batch: int) -> int:
        """m, the micro-batches that one rank works through in a step of `batch` sequences.

        Raises:
            RefusedError: the batch does not divide over dp and mb.
        """
        if batch < 1 or batch % (self.dp * self.mb):
            raise RefusedError(
                f"a batch of {batch} sequences cannot be cut into dp={self.dp} x mb={self.mb}; "
                f"the batch can be {self._nearest_batch(batch)}"
            )
        return batch // (self.dp * self.mb)

    def _nearest_batch(self, batch: int) -> str:
        unit = self.dp * self.mb
        below, above = batch // unit * unit, -(-max(batch, 1) // unit) * unit
        return f"{below} or {above}" if below else str(above)

    def settings(self) -> dict[str, object]:
        """Every key and its value as text, number or switch, but for those left to follow."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        left = {"shard": 0, "v": 0, "sp": None}
        return {
            key: str(value) if key in _TYPES else value
            for key, value in values.items()
            if key not in left or value != left[key]
        }

    def __str__(self) -> str:
        """One line that `parse` reads back: the degrees, and what differs from the defaults."""
        default = Layout().settings()
        return " ".join(
            f"{key}={_show(value)}"
            for key, value in self.settings().items()
            if key in ("dp", "pp", "tp") or key not in default or value != default[key]
        )

    @classmethod
    def parse(cls, line: str) -> "Layout":
        """Read a line such as `dp=2, tp=4 zero=3`: any order, spaces or commas.

        Raises:
            UsageError: an unknown key, a key twice, or a value of the wrong kind.
            RefusedError: shard does not divide dp.
        """
        values: dict[str, object] = {}
        for word in line.replace(",", " ").split():
            key, equals, text = word.partition("=")
            if not equals or not text:
                raise UsageError(f"cannot read {word!r} in a layout; write key=value, as in tp=2")
            if key in values:
                raise UsageError(f"{key} stands twice in the layout {line!r}")
            values[key] = text
        return cls.from_mapping(values)

    @classmethod
    def from_mapping(cls, values: dict[str, object]) -> "Layout":
        """Build a layout from keys and values, as a run file or a line gives them.

        Args:
            values: of each key its value, or the text that a line has for it.

        Raises:
            UsageError: an unknown key (the message has the nearest), or a value of the wrong kind.
            RefusedError: shard does not divide dp.
        """
        known = {field.name for field in fields(cls)}
        for key in values:
            if key not in known:
                raise unknown_key("layout", key, {"layout": known})
        return cls(**{key: _read(key, value) for key, value in values.items()})  # type: ignore[arg-type]  # _read gives each key its type


_TYPES: dict[str, type[Recompute] | type[Offload] | type[Precision]] = {
    "recompute": Recompute,
    "offload": Offload,
    "precision": Precision,
}


def share(total: int, parts: int, index: int) -> tuple[int, int]:
    """Offset and size of part `index` when `total` is cut as evenly as possible.

    The first `total % parts` parts hold one more.

    Args:
        total: what is cut.
        parts: how many there are.
        index: which, from 0.

    Example:
        >>> [share(10, 4, index) for index in range(4)]
        [(0, 3), (3, 3), (6, 2), (8, 2)]
    """
    size, left = divmod(total, parts)
    return index * size + min(index, left), size + (index < left)


def _join(values: tuple[int, ...]) -> str:
    return "+".join(str(v) for v in values)


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return _join(value) if isinstance(value, tuple) else str(value)


def _one_of(key: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{key}={value}; {key} can be {', '.join(str(a) for a in allowed)}")


def _read(key: str, value: object) -> object:
    if key == "schedule" and (":" in str(value) or str(value).endswith(".csv")):
        return str(value)
    if key in _TYPES:
        return value if isinstance(value, _TYPES[key]) else _TYPES[key].parse(str(value))
    if key in ("schedule", "context"):
        return str(value).lower()
    if key in ("sp", "compile", "optimistic", "reshard"):
        return _switch(key, value)
    if key == "stages":
        parts = value if isinstance(value, list | tuple) else str(value).split("+")
        return tuple(_integer(key, part) for part in parts)
    return _integer(key, value)


def _switch(key: str, value: object) -> bool:
    words = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}
    if str(value).lower() not in words:
        raise UsageError(f"{key}={value}; {key} can be on or off")
    return words[str(value).lower()]


def _integer(key: str, value: object) -> int:
    try:
        if isinstance(value, bool | float):
            raise ValueError
        return int(str(value))
    except ValueError:
        raise UsageError(f"{key}={value}; {key} is a whole number") from None
