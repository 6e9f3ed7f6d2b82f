"""Whether a run has room in memory, asked before anything is started.

What is counted is the least that a run can need: the state of every rank, the activations of one
micro-batch, and the token ids of a batch. So what is refused could not have run; what is let
through may still run out, and then says so.
"""

import errno
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from phalanx.core.errors import RefusedError
from phalanx.core.precision import Precision
from phalanx.core.run import Run
from phalanx.core.units import show_bytes
from phalanx.cost.memory import ours, rank_memory
from phalanx.trainer.run.cores import CGROUPS, own_groups

PROCESS_BYTES = 64 << 20  # of a rank besides what it shares with the process it was forked from
PROCESS_ADDRESSES = 1280 << 20  # of a rank: torch, its threads and what each of them reserves
_PRECISE = 0.9  # how far below the truth a count may lie that is meant to be exact
_IDS = 3 * 8  # bytes of a token in a batch: read, predicted, numbered; int64 each
_GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
_MESSAGES = ("can't allocate memory", "not enough memory", "std::bad_alloc", "out of memory")


class Room(NamedTuple):
    """What the ranks of one machine need at least, and what is there.

    Attributes:
        needed: bytes.
        free: bytes.
        of: what memory, in words.
        batch: bytes of what is needed that are token ids.
    """

    needed: float
    free: float
    of: str
    batch: float = 0.0


def refuse_too_large(run: Run, local_ranks: int) -> Room:
    """Stop if the ranks of this machine cannot have room in its memory.

    Args:
        run: what would be trained.
        local_ranks: how many of its ranks are on this machine.

    Returns:
        The tightest of the limits that it keeps.

    Raises:
        RefusedError: with what it needs, what there is, and what would need less.
    """
    rooms = list(_rooms(run, local_ranks))
    for room in rooms:
        if room.needed > room.free:
            smaller = "more ranks on other machines, zero=3 or a smaller model"
            if room.batch > room.needed / 2:
                smaller = f"a smaller recipe.batch than {run.recipe.batch:,}"
            raise RefusedError(
                f"{run.layout} needs at least {show_bytes(room.needed, binary=True)} of {room.of}, "
                f"and {show_bytes(room.free, binary=True)} are free; use {smaller}"
            )
    return max(rooms, key=lambda room: room.needed / max(room.free, 1.0))


def least_bytes(run: Run, pp_rank: int, default: str) -> float:
    """Bytes that a rank needs at least, by the count that the planner uses too.

    Args:
        run: what would be trained.
        pp_rank: of the rank.
        default: the format that `precision=auto` means.
    """
    layout = run.layout
    rest = layout.precision.on(default).rest
    plain = replace(layout, precision=Precision(rest=rest))
    one_micro_batch = 1.0
    memory = rank_memory(
        run.model, plain, run.recipe.seq, pp_rank, one_micro_batch, ours(run.recipe)
    )
    return float(_PRECISE * memory.allocated)


def _rooms(run: Run, local_ranks: int) -> Iterator[Room]:
    layout = run.layout
    batch = run.recipe.batch / layout.dp * run.recipe.seq * _IDS  # of each rank
    yield Room(batch * local_ranks, free_bytes(), "memory for token ids", batch * local_ranks)
    gpu = _gpu_bytes(local_ranks)
    each = [least_bytes(run, rank, "fp32" if gpu is None else "bf16") for rank in range(layout.pp)]
    if gpu is not None:
        yield Room(max(each), gpu, "a GPU's memory")
        return
    count = "1 rank" if local_ranks == 1 else f"{local_ranks} ranks on this machine"
    total = sum(each) / layout.pp * local_ranks + local_ranks * (batch + PROCESS_BYTES)
    yield Room(total, free_bytes(), f"memory for {count}", batch * local_ranks)
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            addresses = PROCESS_ADDRESSES if kind == resource.RLIMIT_AS else 0
            yield Room(max(each) + batch + addresses, limit, "memory for a process (ulimit)", batch)


def free_bytes(cgroups: Path = CGROUPS) -> float:
    """Main memory that can still be had, on this machine or in its container.

    Args:
        cgroups: where the system shows the limits of containers.
    """
    return min([_available(), *_quotas(cgroups)])


def ran_out(error: BaseException) -> str:
    """One line if an error means that memory ran out; empty if it means something else."""
    system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    by_torch = isinstance(error, RuntimeError) and any(m in str(error).lower() for m in _MESSAGES)
    if not (system or by_torch or isinstance(error, MemoryError)):
        return ""
    first = str(error).strip().partition("\n")[0]
    return (
        f"memory ran out ({first or 'no more could be had'}); a smaller layout.mb, recompute=full, "
        "more ranks or a smaller model need less"
    )


def _available() -> float:
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return float(value.split()[0]) * 1024
    return float("inf")


def _quotas(cgroups: Path) -> Iterator[float]:
    for folder in (cgroups, *own_groups(cgroups)):
        with suppress(OSError, ValueError):
            limit = int((folder / "memory.max").read_text(encoding="ascii"))  # "max" is no number
            used = int((folder / "memory.current").read_text(encoding="ascii"))
            yield limit - used + _reclaimable(folder)
    with suppress(OSError, ValueError):
        version_1 = cgroups / "memory"
        limit = int((version_1 / "memory.limit_in_bytes").read_text(encoding="ascii"))
        yield limit - int((version_1 / "memory.usage_in_bytes").read_text(encoding="ascii"))


def _reclaimable(folder: Path) -> int:
    """Bytes of files that are only cached: they make room when it is wanted."""
    with suppress(OSError, ValueError):
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    return 0


def _gpu_bytes(local_ranks: int) -> float | None:
    """Memory of the smallest GPU, if each rank gets one; None where ranks run on the CPU."""
    if not any(driver.exists() for driver in _GPU_DRIVERS):
        return None
    import torch

    count = torch.cuda.device_count()
    if count < local_ranks:
        return None
    return float(min(torch.cuda.get_device_properties(i).total_memory for i in range(count)))
