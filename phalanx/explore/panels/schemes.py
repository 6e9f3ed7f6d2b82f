"""Part 2: what each scheme splits, the shapes that are left on a chip, and its collectives."""

from collections.abc import Callable, Iterator
from html import escape
from typing import NamedTuple

from phalanx.explore.draw import percent
from phalanx.explore.machine import Hardware, machine
from phalanx.explore.records import BOOK, Panel, Picture, Record, number, show, word
from phalanx.explore.state import Reading

MOST = 4  # shards of an axis that are drawn
HEIGHT = 92  # pixels of an array
BYTES = 2  # of a number in bf16


class Dim(NamedTuple):
    """One dim of an array: its letter, and the axis that splits it."""

    letter: str
    axis: str = ""


class Array(NamedTuple):
    """One of the four arrays of a layer."""

    name: str
    rows: Dim
    columns: Dim
    outer: Dim | None = None  # experts or layers


class Scheme(NamedTuple):
    """A sharding of the four arrays, and what it makes chips send.

    Attributes:
        title: what people call it.
        arrays: In, W_in, W_out and Out.
        forward, backward: collectives: what, over which axis, of which bytes.
    """

    title: str
    arrays: tuple[Array, Array, Array, Array]
    forward: tuple[tuple[str, str, str], ...]
    backward: tuple[tuple[str, str, str], ...]


def _four(
    activations: tuple[str, str], weights: tuple[str, str], outer: Dim | None = None
) -> tuple[Array, Array, Array, Array]:
    """The four arrays: (axis of B, axis of D) of activations, (axis of D, axis of F) of weights."""
    batch, hidden = activations
    wide, narrow = weights
    return (
        Array("In", Dim("B", batch), Dim("D", hidden)),
        Array("W_in", Dim("D", wide), Dim("F", narrow), outer),
        Array("W_out", Dim("F", narrow), Dim("D", wide), outer),
        Array("Out", Dim("B", batch), Dim("D", hidden)),
    )


SCHEMES: dict[str, Scheme] = {
    "dp": Scheme(
        "Data parallelism", _four(("DP", ""), ("", "")),
        (),
        (("AllReduce dW_in", "DP", "weights"), ("AllReduce dW_out", "DP", "weights")),
    ),
    "fsdp": Scheme(
        "Fully-sharded data parallelism (ZeRO-3)", _four(("DP", ""), ("DP", "")),
        (("AllGather W_in", "DP", "weights"), ("AllGather W_out", "DP", "weights")),
        (
            ("AllGather W_out, W_in", "DP", "two weights"),
            ("ReduceScatter dW_out, dW_in", "DP", "two weights"),
        ),
    ),
    "tp": Scheme(
        "Tensor parallelism (Megatron)", _four(("", "TP"), ("", "TP")),
        (("AllGather In", "TP", "activations"), ("ReduceScatter Out", "TP", "activations")),
        (("AllGather dOut", "TP", "activations"), ("ReduceScatter dIn", "TP", "activations")),
    ),
    "mixed": Scheme(
        "FSDP and tensor parallelism", _four(("DP", "TP"), ("DP", "TP")),
        (
            ("AllGather W_in, W_out", "DP", "two cut weights"),
            ("AllGather In", "TP", "cut activations"),
            ("ReduceScatter Out", "TP", "cut activations"),
        ),
        (
            ("AllGather W_out, W_in", "DP", "two cut weights"),
            ("ReduceScatter dW_out, dW_in", "DP", "two cut weights"),
            ("AllGather dOut", "TP", "cut activations"),
            ("ReduceScatter dIn", "TP", "cut activations"),
        ),
    ),
    "pp": Scheme(
        "Pipeline parallelism", _four(("", ""), ("", ""), Dim("L", "PP")),
        (("Send Out to the next stage", "PP", "activations"),),
        (("Send dIn to the previous stage", "PP", "activations"),),
    ),
    "ep": Scheme(
        "Expert parallelism", _four(("EP", ""), ("", ""), Dim("E", "EP")),
        (("AllToAll: dispatch In", "EP", "routed"), ("AllToAll: combine Out", "EP", "routed")),
        (("AllToAll: dOut", "EP", "routed"), ("AllToAll: dIn", "EP", "routed")),
    ),
}  # fmt: skip


def schemes(state: Reading) -> Panel:
    """The four arrays of a layer under the scheme that is looked at.

    Args:
        state: what is read.
    """
    m = machine(state)
    degrees = {"DP": m.dp, "TP": m.tp, "PP": m.pp, "EP": state.whole("ep"), "": 1}
    sizes = {
        "B": m.tokens, "D": m.block.h, "F": m.block.f, "E": m.block.E, "L": state.whole("L"),
    }  # fmt: skip
    name = state.text("scheme")
    scheme = SCHEMES[name]
    records: list[Record] = [
        word("s.title", scheme.title, source=f"{BOOK}, What Do We Mean By Scaling?"),
        word("s.syntax", _syntax(scheme)),
        *(
            number(f"s.{array.name}", _local(array, sizes, degrees) * BYTES, "bytes",
                   formula=f"{BYTES} bytes · {_shape_letters(array)}", numbers=_shape(array, sizes, degrees))
            for array in scheme.arrays
        ),
    ]  # fmt: skip
    for way, collectives in (("forward", scheme.forward), ("backward", scheme.backward)):
        records.append(_total(f"s.{way}", collectives, m))
    return Panel(
        tuple(records),
        (_arrays(scheme, sizes, degrees), _collectives(scheme, m)),
    )


def _bytes(what: str, m: Hardware) -> tuple[float, str]:
    """Bytes of one collective of one layer, and the formula."""
    h, f, E = m.block.h, m.block.f, m.block.E
    weights, acts = 2.0 * h * E * f, 2.0 * m.tokens * h
    match what:
        case "weights":
            return weights, "2 · D · E · F"
        case "two weights":
            return 2 * weights, "4 · D · E · F"
        case "two cut weights":
            return 2 * weights / m.tp, "4 · D · E · F / TP"
        case "cut activations":
            return acts / m.dp, "2 · B · D / DP"
        case "routed":
            return acts * m.block.k / m.dp, "2 · B · D · k / DP, at most"
        case _:
            return acts, "2 · B · D"


def _total(id: str, collectives: tuple[tuple[str, str, str], ...], m: Hardware) -> Record:
    total = sum(_bytes(what, m)[0] for _, _, what in collectives)
    formula = " + ".join(_bytes(what, m)[1] for _, _, what in collectives) or "0"
    return number(id, total, "bytes", formula=formula, source=f"{BOOK}, one layer, bf16")


def _local(array: Array, sizes: dict[str, float], degrees: dict[str, int]) -> float:
    """Elements of an array that one chip holds; of layers, one."""
    found = 1.0
    for dim in (array.rows, array.columns):
        found *= sizes[dim.letter] / degrees[dim.axis]
    if array.outer is not None and array.outer.letter == "E":
        found *= sizes["E"] / degrees["EP"]
    return found


def _dims(array: Array) -> Iterator[Dim]:
    if array.outer is not None:
        yield array.outer
    yield array.rows
    yield array.columns


def _shape(array: Array, sizes: dict[str, float], degrees: dict[str, int]) -> str:
    return " × ".join(show(sizes[d.letter] / degrees[d.axis], "") for d in _dims(array))


def _shape_letters(array: Array) -> str:
    return " · ".join(
        d.letter + (f"/{d.axis}" if d.axis else "") for d in _dims(array) if d.letter != "L"
    )


def _subscripts(array: Array) -> str:
    inner = ", ".join(d.letter + (f"_{d.axis}" if d.axis else "") for d in _dims(array))
    return f"{array.name}[{inner}]"


def _syntax(scheme: Scheme) -> str:
    first, up, down, last = (_subscripts(array) for array in scheme.arrays)
    return f"{first} · {up} · {down} → {last}"


def _arrays(scheme: Scheme, sizes: dict[str, float], degrees: dict[str, int]) -> Picture:
    boxes = "".join(_box(array, sizes, degrees) for array in scheme.arrays)
    rows = [
        (
            _subscripts(a),
            _shape(a, sizes, degrees),
            show(_local(a, sizes, degrees) * BYTES, "bytes"),
        )
        for a in scheme.arrays
    ]
    label = f"{scheme.title}: {_syntax(scheme)}"
    return Picture("s.arrays", label, f'<div class="arrays">{boxes}</div>',
                   ("array", "on one chip", "bytes"), rows)  # fmt: skip


def _box(array: Array, sizes: dict[str, float], degrees: dict[str, int]) -> str:
    name = escape(_subscripts(array))
    axes = sorted({d.axis for d in _dims(array) if d.axis})
    if not axes:
        caption = "a copy on every chip"
    else:
        caption = " × ".join(f"{degrees[a]:,}-way {a}" for a in axes)
    outer = array.outer.axis if array.outer else ""
    cells = _stacked(min(degrees[outer], MOST)) if outer else _cells(array, degrees)
    return (
        f'<div class="array"><div class="arrayname">{name}</div>'
        f'<svg width="100%" height="{HEIGHT}" aria-hidden="true">{cells}</svg>'
        f'<div class="arrayshape">{escape(_shape(array, sizes, degrees))}</div>'
        f'<div class="arraynote">{escape(caption)}</div></div>'
    )


def _cells(array: Array, degrees: dict[str, int]) -> str:
    """A grid of shards, coloured by chip; a whole array has the stripes of all chips."""
    rows, columns = (min(degrees[d.axis], MOST) for d in (array.rows, array.columns))
    if not array.rows.axis and not array.columns.axis:
        return _rects(1, MOST, lambda _, j: j, "copy")
    inner = columns if array.columns.axis == "TP" else rows
    by_dp = array.rows.axis in ("DP", "EP") or array.columns.axis in ("DP", "EP")

    def chip(i: int, j: int) -> int:
        dp, tp = (i, j) if array.rows.axis in ("DP", "EP", "") else (j, i)
        return (
            dp * inner + tp if by_dp and "TP" in (array.rows.axis, array.columns.axis) else dp + tp
        )

    return _rects(rows, columns, chip, "shard")


def _stacked(layers: int) -> str:
    """Layers or experts behind each other."""
    parts = []
    for i in reversed(range(layers)):
        x, y = percent(0.16 * i / max(layers - 1, 1)), HEIGHT * 0.2 * i / max(layers - 1, 1)
        parts.append(
            f'<rect x="{x}" y="{y:.1f}" width="82%" height="{HEIGHT * 0.78:.1f}" class="d-{i % 8} shard"/>'
        )
    return "".join(parts)


def _rects(rows: int, columns: int, chip: Callable[[int, int], int], kind: str) -> str:
    parts = []
    for i in range(rows):
        for j in range(columns):
            parts.append(
                f'<rect x="{percent(j / columns)}" y="{HEIGHT * i / rows:.1f}" '
                f'width="{percent(1 / columns)}" height="{HEIGHT / rows:.1f}" '
                f'class="d-{chip(i, j) % 8} {kind}"/>'
            )
    return "".join(parts)


def _collectives(scheme: Scheme, m: Hardware) -> Picture:
    rows = [
        (way, what, axis, f"{_bytes(of, m)[1]} = {show(_bytes(of, m)[0], 'bytes')}")
        for way, collectives in (("forward", scheme.forward), ("backward", scheme.backward))
        for what, axis, of in collectives or (("nothing", "", ""),)
        if axis or not collectives
    ]
    rows = [(a, b, c, d if c else "—") for a, b, c, d in rows]
    items = "".join(
        f'<li><span class="way">{escape(way)}</span> <span class="axis-{escape(axis or "none")}">'
        f'{escape(what)}</span> <span class="quiet">{escape(size)}</span></li>'
        for way, what, axis, size in rows
    )
    return Picture("s.collectives", "what travels in one layer", f'<ul class="collectives">{items}</ul>',
                   ("pass", "collective", "axis", "bytes of one layer"), rows)  # fmt: skip
