"""Which kernels some steps of a run spend their time in, by torch's own profiler.

It is off unless `recipe.profile` asks for steps, and then nothing is imported or called. The steps
that are profiled take longer: the profiler notes every operator.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from phalanx.trainer.run.session import Session

TABLE, TRACE = "kernels.json", "kernels-trace.json"
WARM = 3  # steps of a session before the profiled ones; one more warms the profiler up
MOST = 400  # kernels of the table; what is left out is small, and added up in one row

# The first that a name contains decides; names as torch and its libraries give them.
CLASSES = (
    ("messages", ("nccl", "gloo", "c10d", "record_param_comms", "all_gather", "all_reduce")),
    ("attention", ("flash", "scaled_dot_product", "sdpa", "fmha", "attention")),
    (
        "matrix products",
        ("mm", "linear", "gemm", "matmul", "onednn_product", "cutlass", "dot", "einsum"),
    ),
    ("optimizer", ("adam", "_foreach", "multi_tensor", "vector_norm", "sgd")),
    ("loss", ("softmax", "nll", "cross_entropy", "gather", "scatter")),
    ("embedding", ("embedding", "index")),
    ("copies", ("copy", "memcpy", "cat", "clone", "contiguous", "memset", "_to_", "pad")),
    ("allocation", ("empty", "resize", "zeros", "fill", "new_")),
)
REST = "passes over memory"


@dataclass
class KernelProfile:
    """Profiles some steps of one rank, after those that warm up.

    Attributes:
        first: step of the session, from 0.
        steps: how many are profiled.
        folder: of the run, on rank 0; None writes nothing.
    """

    first: int
    steps: int
    folder: Path | None
    _profiler: Any = field(default=None, repr=False)

    @property
    def begins(self) -> int:
        """The first step that is profiled."""
        return self.first + WARM

    def before(self, step: int) -> None:
        """Begin, one step ahead of the first that counts.

        Args:
            step: that comes, from 0.
        """
        if self.steps and step == self.begins - 1:
            self._profiler = torch.profiler.profile(
                activities=torch.profiler.supported_activities(),
                schedule=torch.profiler.schedule(wait=0, warmup=1, active=self.steps, repeat=1),
            )
            self._profiler.start()

    def after(self, step: int) -> None:
        """End, and write what was found.

        Args:
            step: that is done, from 0.
        """
        if self._profiler is None:
            return
        if step >= self.begins + self.steps - 1:  # the trace, before the profiler forgets it
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            if self.folder is not None:
                self._write(profiler, self.folder)
            return
        self._profiler.step()

    def _write(self, profiler: Any, folder: Path) -> None:
        """Write both files; a disk that is full must not end a run."""
        with suppress(OSError, RuntimeError):
            profiler.export_chrome_trace(str(folder / TRACE))
        rows = list(_rows(profiler.key_averages(), self.steps))
        document = {"first": self.begins + 1, "last": self.begins + self.steps, "kernels": rows}
        with suppress(OSError):
            draft = folder / f".{TABLE}.tmp"
            draft.write_text(json.dumps(document), encoding="utf-8")
            draft.replace(folder / TABLE)


def profiled(session: Session, first: int) -> KernelProfile | None:
    """What profiles the steps of a session; None where nobody asked.

    Args:
        session: of this rank; its folder is that of rank 0.
        first: step of the session, from 0.
    """
    steps = session.run.recipe.profile
    if not steps:
        return None
    return KernelProfile(first, steps, session.directory.path if session.directory else None)


def class_of(name: str) -> str:
    """What an operator or kernel is for, by its name.

    Example:
        >>> class_of("aten::mm"), class_of("ncclDevKernel_AllReduce"), class_of("aten::mul")
        ('matrix products', 'messages', 'passes over memory')
    """
    lower = name.lower()
    for kind, words in CLASSES:
        if any(word in lower for word in words):
            return kind
    return REST


def _rows(events: Iterable[Any], steps: int) -> Iterable[dict[str, Any]]:
    """Kernels by their own seconds in a step, longest first; those of the device if it has any."""
    found = [(str(e.key), int(e.count), *_own_seconds(e)) for e in events]
    on_device = any(device for _, _, device, _ in found)
    timed = [
        (device if on_device else host, name, count)
        for name, count, device, host in found
        if (device if on_device else host) > 0 and not name.startswith("ProfilerStep")
    ]
    timed.sort(reverse=True)
    for seconds, name, count in timed[:MOST]:
        yield {
            "name": name,
            "kind": class_of(name),
            "times": count / steps,
            "seconds": seconds / steps,
        }
    if rest := timed[MOST:]:
        seconds = sum(each for each, _, _ in rest) / steps
        yield {"name": "others", "kind": REST, "times": len(rest) / steps, "seconds": seconds}


def _own_seconds(event: Any) -> tuple[float, float]:
    """Seconds of an event without those inside it, on the device and on the host."""
    device = float(event.self_device_time_total)
    return 1e-6 * device, 1e-6 * float(event.self_cpu_time_total)
