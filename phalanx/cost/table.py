"""Layouts by column: every formula of this package takes a table; one layout is a table of one row.

A search looks at millions of layouts, which as values would take minutes and gigabytes. A formula
that is written once over columns serves the search, an estimate of one layout, and the ledger that
the trainer is held against.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.offload import Offload
from phalanx.core.precision import Precision
from phalanx.core.recompute import Recompute
from phalanx.core.run import Recipe, Run
from phalanx.schedules.layouts import chunks
from phalanx.schedules.registry import find_schedule

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]
Which = Integers | Booleans | slice  # rows: by place, by whether they are meant, or in a row
Column = Any  # a number, or an array of them whose shape broadcasts with those beside it

T = TypeVar("T")
_DEGREES = ("dp", "pp", "tp", "cp", "ep", "zero", "mb", "logits")
_CHOICES = ("schedule", "recompute", "offload", "context", "stages")


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A column whose values are no numbers: the few that occur, and which of them each row has.

    Attributes:
        values: those that occur.
        codes: the place of each row's value among them.
    """

    values: tuple[T, ...]
    codes: Integers

    @classmethod
    def of(cls, column: Sequence[T]) -> "Choice[T]":
        """A column of shape (rows,), its values in the order in which they first occur.

        Example:
            >>> Choice.of(["1f1b", "zb-v", "1f1b"])
            Choice(values=('1f1b', 'zb-v'), codes=array([0, 1, 0]))
        """
        values = tuple(dict.fromkeys(column))
        places = {value: place for place, value in enumerate(values)}
        return cls(values, np.array([places[value] for value in column], dtype=np.int64))

    def pick(self, of: Callable[[T], float]) -> Floats:
        """A number that follows from the value, in every row.

        Args:
            of: gives the number; it is asked once for each value.
        """
        result: Floats = np.array([of(value) for value in self.values], dtype=np.float64)[
            self.codes
        ]
        return result

    def test(self, of: Callable[[T], bool]) -> Booleans:
        """Whether each row's value has a property.

        Args:
            of: tells; it is asked once for each value.
        """
        result: Booleans = np.array([bool(of(value)) for value in self.values])[self.codes]
        return result

    def take(self, which: Which, *, alone: bool = False) -> "Choice[T]":
        """Some of the rows; one value for all of them stays, unless there is one row alone.

        Args:
            which: the rows.
            alone: the table has one row, so its one code is that of a row, and not of all rows.
        """
        return Choice(self.values, self.codes[which] if alone else some_rows(self.codes, which))

    def of_shape(self, *shape: int) -> "Choice[T]":
        """The same in another shape."""
        return Choice(self.values, self.codes.reshape(shape))


@dataclass(frozen=True, kw_only=True)
class Table:
    """Ways to cut the step of one model: keys of layouts in columns, resolved.

    Columns are whole numbers or switches of any shapes that broadcast: (rows,) where each row is a
    layout, (rows, 1) beside (1, shardings) where rows meet several ways to shard them.

    Attributes:
        model, recipe: what is trained; of the recipe seq, batch and what changes messages or bytes.
        precision: of all rows.
        dp, pp, tp, cp, ep, zero, mb, logits: as in a layout.
        shards: dp ranks that share one sharded copy.
        v: chunks of layers per pipeline rank.
        sp, reshard, compile, optimistic: switches.
        schedule, recompute, offload, context, stages: the other keys.
    """

    model: ModelShape
    recipe: Recipe
    precision: Precision
    dp: Integers
    pp: Integers
    tp: Integers
    cp: Integers
    ep: Integers
    zero: Integers
    mb: Integers
    logits: Integers
    shards: Integers
    v: Integers
    sp: Booleans
    reshard: Booleans
    compile: Booleans
    optimistic: Booleans
    schedule: Choice[str]
    recompute: Choice[Recompute]
    offload: Choice[Offload]
    context: Choice[str]
    stages: Choice[tuple[int, ...]]

    @classmethod
    def of(cls, model: ModelShape, recipe: Recipe, layouts: Sequence[Layout]) -> "Table":
        """One row for each layout; all have the precision of the first.

        Args:
            model: what is trained.
            recipe: of it seq, batch and what changes messages or bytes.
            layouts: at least one.

        Example:
            >>> from phalanx.catalog.load import model
            >>> layouts = [Layout(dp=8, mb=2), Layout(dp=4, tp=2)]
            >>> Table.of(model("gpt-3-175b"), Recipe(seq=2048, batch=64), layouts).m
            array([ 4, 16])
        """
        degrees: dict[str, Any] = {
            key: _integers(getattr(x, key) for x in layouts) for key in _DEGREES
        }
        choices: dict[str, Any] = {
            key: Choice.of([getattr(x, key) for x in layouts]) for key in _CHOICES
        }
        return cls(
            model=model,
            recipe=recipe,
            precision=layouts[0].precision,
            shards=_integers(x.shards for x in layouts),
            v=_integers(chunks(x) for x in layouts),
            sp=_switches(x.sequence_parallel for x in layouts),
            reshard=_switches(x.reshard for x in layouts),
            compile=_switches(x.compile for x in layouts),
            optimistic=_switches(x.optimistic for x in layouts),
            **degrees,
            **choices,
        )

    @classmethod
    def of_run(cls, run: Run) -> "Table":
        """The one row of a run."""
        return cls.of(run.model, run.recipe, [run.layout])

    def take(self, which: Which, **columns: Any) -> "Table":
        """Some of the rows, or some of them several times, with new values in some columns.

        A column of one value for all rows stays what it is.
        """
        alone = len(self) == 1  # then no column says whether it is one for all
        some: dict[str, Any] = {
            key: value.take(which, alone=alone)
            if isinstance(value, Choice)
            else value[which]
            if alone
            else some_rows(value, which)
            for key, value in self._columns()
            if key not in columns
        }
        return replace(self, **(some | columns))

    def __len__(self) -> int:
        return max(len(getattr(c, "codes", c)) for _, c in self._columns())

    @property
    def tall(self) -> "Table":
        """Columns of shape (rows, 1), which meet the (1, shardings) of ways to shard them."""
        return self.of_shape(-1, 1)

    def of_shape(self, *shape: int) -> "Table":
        """Every column in another shape."""
        some: dict[str, Any] = {
            key: value.of_shape(*shape) if isinstance(value, Choice) else value.reshape(shape)
            for key, value in self._columns()
        }
        return replace(self, **some)

    def _columns(self) -> Iterator[tuple[str, Any]]:
        for field in fields(self):
            if field.name not in ("model", "recipe", "precision"):
                yield field.name, getattr(self, field.name)

    @property
    def m(self) -> Integers:
        """Micro-batches per rank and step."""
        return self.recipe.batch // (self.dp * self.mb)

    @property
    def sharers(self) -> Integers:
        """Ranks that share one sharded copy: cp ranks hold the same weights as well."""
        return self.shards * self.cp

    @property
    def zero_stage(self) -> Integers:
        """What is really sharded: `zero`, or 0 where no two ranks share a copy."""
        return np.where(self.sharers > 1, self.zero, 0)

    @property
    def asynchronous(self) -> Booleans:
        """Whether every micro-batch moves the weights, rather than all of a step together."""
        return self.schedule.test(lambda name: find_schedule(name).asynchronous)

    @property
    def reduces_every(self) -> Booleans:
        """Whether the gradients of every micro-batch are reduced by themselves."""
        return (self.zero_stage >= 2) | self.asynchronous

    @property
    def sequence_parts(self) -> Integers:
        """Into how many parts activations are cut along the sequence."""
        return self.cp * np.where(self.sp, self.tp, 1)

    @property
    def padded_seq(self) -> Integers:
        """The length that ranks compute with: whole parts, and two chunks on each cp rank."""
        unit = self.sequence_parts * np.where(self.cp > 1, 2, 1)
        return -(-self.recipe.seq // unit) * unit

    @property
    def tokens(self) -> Integers:
        """Of one micro-batch on one cp rank, padding included."""
        return self.padded_seq // self.cp * self.mb


def some_rows(column: Column, which: Any) -> Column:
    """Some rows of a column; one value for all rows stays what it is.

    Args:
        column: a number, or an array whose first axis is the rows, or has length 1.
        which: places of rows, a mask of them, or a slice.
    """
    return column if np.ndim(column) == 0 or len(column) == 1 else column[which]


def _integers(values: Iterable[int]) -> Integers:
    return np.array(list(values), dtype=np.int64)


def _switches(values: Iterable[bool]) -> Booleans:
    return np.array(list(values), dtype=np.bool_)
