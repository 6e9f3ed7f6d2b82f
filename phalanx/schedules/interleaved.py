"""Interleaved 1F1B: every rank holds v chunks of layers, so that the pipeline fills v times sooner.

Symbols: p pipeline ranks, m micro-batches, v chunks per rank; stage s lives on rank s mod p.
Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.2.
"""

from collections.abc import Iterator

from phalanx.core.errors import RefusedError
from phalanx.core.schedule import Action, Kind, Schedule


def interleaved(p: int, m: int, v: int) -> Schedule:
    """Order the work of `m` micro-batches over `p` ranks with `v` chunks each.

    The bubble is (p - 1) / (v m). Rank r holds at most (v - 1) p + 2 (p - 1 - r) + 1
    chunks in flight (or all v m), each 1/v of its layers.

    Raises:
        RefusedError: m is no multiple of p, or there is nothing to interleave.
    """
    _require_interleavable(p, m, v)
    rows = tuple(tuple(_row(rank, p, m, v)) for rank in range(p))
    return Schedule("interleaved", p, m, v, rows, ranks=tuple(s % p for s in range(p * v)))


def _row(rank: int, p: int, m: int, v: int) -> Iterator[Action]:
    warmup = min((v - 1) * p + 2 * (p - 1 - rank), v * m)
    for k in range(warmup):
        yield _forward(k, rank, p, v)
    for k in range(v * m - warmup):
        yield _forward(warmup + k, rank, p, v)
        yield _backward(k, rank, p, v)
    for k in range(v * m - warmup, v * m):
        yield _backward(k, rank, p, v)


def _forward(k: int, rank: int, p: int, v: int) -> Action:
    """The k-th forward of a rank: p micro-batches through chunk 0, the same p through chunk 1..."""
    group, place = divmod(k, p * v)
    chunk, i = divmod(place, p)
    return Action(chunk * p + rank, Kind.FORWARD, group * p + i)


def _backward(k: int, rank: int, p: int, v: int) -> Action:
    """The k-th backward of a rank: as the forwards, but through the last chunk first."""
    group, place = divmod(k, p * v)
    chunk, i = divmod(place, p)
    return Action((v - 1 - chunk) * p + rank, Kind.BACKWARD, group * p + i)


def _require_interleavable(p: int, m: int, v: int) -> None:
    if p < 2:
        raise RefusedError(
            f"interleaved has nothing to interleave on p={p} rank; "
            "p must be at least 2, or use schedule 1f1b with v=1"
        )
    if v < 2:
        raise RefusedError(
            f"interleaved with v={v} chunk per rank has nothing to interleave; "
            "v must be at least 2, or use schedule 1f1b"
        )
    if m % p:
        below = m // p * p
        nearest = f"{below} or {below + p}" if below else f"{p}"
        raise RefusedError(
            f"m={m} micro-batches do not go round p={p} ranks evenly, as interleaved needs; "
            f"m can be {nearest}"
        )
