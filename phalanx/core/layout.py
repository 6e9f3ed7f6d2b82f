"""How one training step is cut: degrees, ZeRO stage, schedule, micro-batching, precision.

A layout prints and parses as one line: `dp=2 pp=2 tp=2 zero=3 schedule=interleaved v=2`.
Ranks are numbered with tp fastest, then cp, pp, and dp outermost.
"""

import re
from dataclasses import dataclass, fields
from typing import NamedTuple

from phalanx.core.errors import RefusedError, UsageError, divisors, shorten, unknown
from phalanx.core.precision import formats

# What the planner can price; phalanx/trainer/run/limits.py names what the trainer runs of it.
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "zb-h1",
    "zb-h2",
    "zb-v",
    "dualpipe",
    "dualpipev",
    "pipedream",
)
FOLDED = ("zb-v", "dualpipev")  # their two chunks per rank form a V
RECOMPUTE = ("none", "selective", "full")
# Or full:k, which keeps the input of every k-th block only (Chen et al. 2016, arXiv:1604.06174).
# Or some parts of a block, joined by +: selective is core; operators is every cheap operator and
# every second product, as selective checkpointing per operator does it.
OFFLOADS = ("activations", "optimizer", "nvme")
RECOMPUTE_PARTS = ("core", "norms", "mlp", "activation", "latent", "experts", "operators")
CONTEXTS = ("ring", "gather", "ulysses")


class Coordinates(NamedTuple):
    """Where a rank stands on each axis."""

    dp: int
    pp: int
    cp: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to cut a step over dp x pp x cp x tp ranks.

    Attributes:
        dp, pp, tp, cp, ep: degrees; ep borrows ranks from dp x cp and is not a factor.
        zero: what data-parallel ranks shard: 0 nothing, 1 optimizer, 2 gradients, 3 weights.
        shard: how many dp ranks share one sharded copy (HSDP); 0 means all of dp.
        v: chunks of layers per pipeline rank; 0 means as few as the schedule can have.
        schedule: the order of micro-batches over the pipeline: a name, or the path of a CSV file
            with one line of actions per rank.
        mb: sequences per micro-batch.
        stages: layers of each of the p v stages; empty means as even as possible. The first and
            the last may hold none, only the embedding or the head.
        recompute: which activations are computed again in backward; a mode, full:k for segments
            of k blocks, or parts as in mlp+norms.
        offload: what leaves the device between its uses: activations, optimizer (master weights,
            moments and gradients, with their update), or nvme (these and the weights, in files);
            joined by +.
        reshard: under zero=3, whether gathered weights are let go after forward; else they stay
            until the last backward of the step.
        logits: tokens whose logits are alive at once, in the loss; 0 means all, from forward to
            backward.
        precision: of the matrix products; "auto" is bf16 on GPU and fp32 on CPU. See
            `core.precision`.
        sp: split the regions that tp leaves whole along the sequence; None means where tp > 1.
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
    schedule: str = "1f1b"
    mb: int = 1
    stages: tuple[int, ...] = ()
    recompute: str = "none"
    offload: str = "none"
    reshard: bool = True
    logits: int = 0
    precision: str = "auto"
    sp: bool | None = None
    compile: bool = False
    optimistic: bool = False
    context: str = "ring"

    def __post_init__(self) -> None:
        """Resolve defaults and reject values that no model could make right."""
        object.__setattr__(self, "v", self.v or (2 if self.schedule in FOLDED else 1))
        for key in ("dp", "pp", "tp", "cp", "ep", "v", "mb"):
            if getattr(self, key) < 1:
                raise UsageError(f"{key}={getattr(self, key)}; a degree is at least 1")
        _one_of("zero", self.zero, (0, 1, 2, 3))
        if not self.schedule.endswith(".csv"):
            _one_of("schedule", self.schedule, SCHEDULES)
        if self.offload != "none" and not set(self.offload.split("+")) <= set(OFFLOADS):
            _one_of("offload", self.offload, ("none", *OFFLOADS))
        if self.logits < 0:
            raise UsageError(f"logits={self.logits}; it is a number of tokens, or 0 for all")
        if not set(self.recompute.split("+")) <= set(RECOMPUTE_PARTS) and not self.segment:
            modes = (*RECOMPUTE, "full:2", "full:3", "...", *RECOMPUTE_PARTS)
            _one_of("recompute", self.recompute, modes)
        formats(self.precision)
        _one_of("context", self.context, CONTEXTS)
        object.__setattr__(self, "shard", self.shard or self.dp)
        object.__setattr__(self, "sp", self.tp > 1 and self.sp is not False)
        if self.shard < 1 or self.dp % self.shard:
            raise RefusedError(
                f"shard={self.shard} does not divide dp={self.dp}; "
                f"shard can be {shorten(divisors(self.dp))}"
            )

    @property
    def ranks(self) -> int:
        """Number of processes: dp x pp x cp x tp."""
        return self.dp * self.pp * self.cp * self.tp

    @property
    def num_stages(self) -> int:
        """Slices of layers, p v."""
        return self.pp * self.v

    @property
    def replicas(self) -> int:
        """Sharded copies of the model under HSDP: dp / shard."""
        return self.dp // self.shard

    @property
    def zero_stage(self) -> int:
        """What is really sharded: `zero`, or 0 where no two ranks share a copy."""
        return self.zero if self.sharers > 1 else 0

    @property
    def sharers(self) -> int:
        """Ranks that share one sharded copy: cp ranks hold the same weights as well."""
        return self.shard * self.cp

    @property
    def sequence_parts(self) -> int:
        """Into how many parts activations are cut along the sequence."""
        return self.cp * (self.tp if self.sp else 1)

    def padded_seq(self, seq: int) -> int:
        """The length that ranks compute with: whole parts, and two chunks on each cp rank."""
        unit = self.sequence_parts * (2 if self.cp > 1 else 1)
        return -(-seq // unit) * unit

    @property
    def offloads(self) -> frozenset[str]:
        """What leaves the device, of `OFFLOADS`."""
        return frozenset(self.offload.split("+")) - {"none"}

    @property
    def segment(self) -> int:
        """Blocks that are recomputed together, from the input of the first; 0 recomputes none."""
        mode, colon, size = self.recompute.partition(":")
        if mode != "full" or (colon and not re.fullmatch("[1-9][0-9]*", size)):
            return 0
        return int(size or 1)

    @property
    def recomputed_parts(self) -> frozenset[str]:
        """What of each block is recomputed, of `RECOMPUTE_PARTS`; none where whole blocks are."""
        parts = self.recompute.replace("selective", "core").split("+")
        return frozenset(parts) & frozenset(RECOMPUTE_PARTS)

    @property
    def asynchronous(self) -> bool:
        """Whether every micro-batch moves the weights, rather than all of a step together."""
        return self.schedule == "pipedream"

    @property
    def reduces_every(self) -> bool:
        """Whether the gradients of every micro-batch are reduced by themselves."""
        return self.zero_stage >= 2 or self.asynchronous

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands; the inverse of `rank_at`."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        dp, pp = divmod(rest, self.pp)
        return Coordinates(dp, pp, cp, tp)

    def rank_at(self, at: Coordinates) -> int:
        """The rank that stands at these coordinates."""
        return ((at.dp * self.pp + at.pp) * self.cp + at.cp) * self.tp + at.tp

    def layers_of_stages(self, layers: int) -> tuple[int, ...]:
        """How many blocks each of the p v stages holds, in order; sums to `layers`.

        Left-over blocks go to the middle stages, since the first also embeds and the last
        also computes the loss.

        Raises:
            RefusedError: the stages named in the layout do not add up, or some would be empty.
        """
        n = self.num_stages
        if self.stages:
            inner = min(self.stages[1:-1], default=1)
            if (
                (len(self.stages), sum(self.stages)) != (n, layers)
                or inner < 1
                or min(self.stages) < 0
            ):
                raise RefusedError(
                    f"stages={_join(self.stages)} is {len(self.stages)} stages of "
                    f"{sum(self.stages)} layers; pp={self.pp} v={self.v} needs {n} stages "
                    f"of {layers}: for example {_join(_even(layers, n))}"
                )
            return self.stages
        if layers < n:
            raise RefusedError(
                f"{layers} layers cannot fill pp={self.pp} x v={self.v} = {n} stages; "
                f"pp x v can be at most {layers}"
            )
        return _even(layers, n)

    def micro_batches(self, batch: int) -> int:
        """m, the micro-batches that one rank works through in a step of `batch` sequences.

        Raises:
            RefusedError: the batch does not divide over dp and mb.
        """
        if batch < 1 or batch % (self.dp * self.mb):
            raise RefusedError(
                f"a batch of {batch} sequences cannot be cut into dp={self.dp} x mb={self.mb}; "
                f"recipe.batch can be {self._nearest_batch(batch)}"
            )
        return batch // (self.dp * self.mb)

    def _nearest_batch(self, batch: int) -> str:
        unit = self.dp * self.mb
        below, above = batch // unit * unit, -(-max(batch, 1) // unit) * unit
        return f"{below} or {above}" if below else str(above)

    def settings(self) -> dict[str, object]:
        """Every key and value, but for those that follow from the degrees as they stand.

        So a saved layout keeps its meaning when one of its degrees is changed.
        """
        default = Layout(dp=self.dp, pp=self.pp, tp=self.tp)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for key in ("shard", "sp"):
            if values[key] == getattr(default, key):
                del values[key]
        return values

    def __str__(self) -> str:
        """One line that `parse` reads back: the degrees, and what differs from the defaults."""
        plain = Layout(dp=self.dp, pp=self.pp, tp=self.tp)
        default = {**vars(plain), "v": Layout(schedule=self.schedule).v}
        return " ".join(
            f"{key}={_show(value)}"
            for key, value in self.settings().items()
            if key in ("dp", "pp", "tp") or value != default[key]
        )

    @classmethod
    def parse(cls, line: str) -> "Layout":
        """Read a line such as `dp=2, tp=4 zero=3`: any order, spaces or commas.

        Raises:
            UsageError: an unknown key, a key twice, or a value of the wrong kind.
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
        """Build a layout from keys and values, as a run file or a line gives them."""
        known = {field.name for field in fields(cls)}
        for key in values:
            if key not in known:
                raise unknown("layout key", key, known)
        return cls(**{key: _read(key, value) for key, value in values.items()})  # type: ignore[arg-type]  # _read gives each key its type


def share(total: int, parts: int, index: int) -> tuple[int, int]:
    """Offset and size of part `index` when `total` is cut as evenly as possible.

    The first `total % parts` parts hold one more.
    """
    size, left = divmod(total, parts)
    return index * size + min(index, left), size + (index < left)


def _even(layers: int, stages: int) -> tuple[int, ...]:
    share, left = divmod(layers, stages)
    first = (stages - left) // 2
    return (share,) * first + (share + 1,) * left + (share,) * (stages - first - left)


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
    if key == "schedule" and str(value).endswith(".csv"):
        return str(value)
    if key in ("schedule", "recompute", "offload", "precision", "context"):
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
