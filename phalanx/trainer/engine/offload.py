"""Where state lives that the device has no room for: host memory, or files that the system pages.

ZeRO-Offload keeps master weights, moments and reduced gradients on the host, and updates there
(Ren et al. 2021, arXiv:2101.06840); ZeRO-Infinity pages them from a disk (Rajbhandari et al. 2021,
arXiv:2104.07857). A CPU is a device like any other: what is moved to its host is copied there.
"""

import errno
import mmap
import os
import tempfile
from typing import Protocol

import torch
from torch import Tensor

from phalanx.core.errors import PhalanxError
from phalanx.core.layout import Layout
from phalanx.core.units import show_bytes


class Memory(Protocol):
    """A place for the state of units."""

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """Zeros that live there, [count].

        Args:
            count: elements.
            dtype: of each.

        Raises:
            PhalanxError: a disk has no room for them, or may not be written.
        """

    def load(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """What lies in `x`, on the device, in another dtype.

        Args:
            x: of any shape; lives there.
            dtype: of the result.

        Returns:
            Of the shape of `x`; on a GPU the current stream may still be copying.
        """

    def rest(self, *tensors: Tensor) -> None:
        """These are not needed for a while."""

    def expect(self, *tensors: Tensor) -> None:
        """These are needed soon."""


class OnDevice:
    """Beside the weights."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """Zeros on the device, [count].

        Args:
            count: elements.
            dtype: of each.
        """
        return torch.zeros(count, dtype=dtype, device=self.device)

    def load(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """It is there already.

        Args:
            x: of any shape, on the device.
            dtype: of the result; `x` itself is given if it is its own.
        """
        return x.to(dtype)

    def rest(self, *tensors: Tensor) -> None:
        """Nothing is gained by it."""

    def expect(self, *tensors: Tensor) -> None:
        """Nothing is gained by it."""


class OnHost(OnDevice):
    """In memory of the host: pinned where the device is a GPU, so that copies run beside its work.

    Attributes:
        bytes: taken so far.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.bytes = 0
        self._places: set[int] = set()

    def owns(self, x: Tensor | torch.UntypedStorage) -> bool:
        """Whether `x` lives in this memory."""
        storage = x.untyped_storage() if isinstance(x, Tensor) else x
        return storage.data_ptr() in self._places

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """Zeros in host memory, [count].

        Args:
            count: elements.
            dtype: of each.
        """
        size = max(count, 1) * dtype.itemsize
        raw = self._take(size)
        self.bytes += size
        self._places.add(raw.data_ptr())
        return raw.view(dtype)[:count]

    def load(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast on the host, since fewer bytes travel then.

        Args:
            x: of any shape, in this memory.
            dtype: of the result; a wider one is reached on the device.
        """
        narrow = x.to(dtype) if dtype.itemsize < x.element_size() else x
        if narrow is not x and self.device.type == "cpu":
            return narrow
        loaded = torch.empty(x.shape, dtype=dtype, device=self.device)
        return loaded.copy_(narrow, non_blocking=True)

    def _take(self, size: int) -> Tensor:
        if self.device.type == "cuda":
            return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


class OnDisk(OnHost):
    """In files that have no name, so that nothing of them is left whatever becomes of us.

    A file takes its room at once: a disk that is too full says so before the first step. Pages
    that rest leave memory; what was loaded after another one last time is read ahead of it.
    """

    def __init__(self, device: torch.device, folder: str = "") -> None:
        super().__init__(device)
        self.folder = folder or tempfile.gettempdir()
        self._maps: dict[int, mmap.mmap] = {}
        self._follows: dict[int, int] = {}
        self._last = 0

    def _take(self, size: int) -> Tensor:
        try:
            with tempfile.TemporaryFile(dir=self.folder, prefix="phalanx-") as file:
                os.posix_fallocate(file.fileno(), 0, size)
                pages = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise PhalanxError(self._explain(error, size)) from error
        raw = torch.frombuffer(pages, dtype=torch.uint8)
        self._maps[raw.data_ptr()] = pages
        return raw

    def _explain(self, error: OSError, size: int) -> str:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return (
                f"offload=nvme has no room for {show_bytes(self.bytes + size)} in {self.folder}; "
                "make room there, or name another folder in data.offload_folder"
            )
        return (
            f"offload=nvme cannot write to {self.folder}: {error.strerror}; "
            "name another folder in data.offload_folder"
        )

    def load(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Read it, and begin to read what came next last time.

        Args:
            x: of any shape, in this memory; its pages leave it again.
            dtype: of the result.
        """
        place = x.untyped_storage().data_ptr()
        self._follows[self._last] = place
        self._last = place
        if place in self._follows:
            self._advise(self._follows[place], mmap.MADV_WILLNEED)
        loaded = super().load(x, dtype)
        self.rest(x)
        return loaded

    def rest(self, *tensors: Tensor) -> None:
        """Let their pages leave memory; the system writes back those that changed."""
        for x in tensors:
            self._advise(x.untyped_storage().data_ptr(), mmap.MADV_DONTNEED)

    def expect(self, *tensors: Tensor) -> None:
        """Begin to read them."""
        for x in tensors:
            self._advise(x.untyped_storage().data_ptr(), mmap.MADV_WILLNEED)

    def _advise(self, place: int, advice: int) -> None:
        pages = self._maps.get(place)
        if pages is not None:
            pages.madvise(advice)


class HostBuffers:
    """Buffers of the host for activations, used again and again.

    Attributes:
        memory: where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.memory = OnHost(device)
        self._free: dict[int, list[Tensor]] = {}
        self._aside = torch.cuda.Stream(device) if device.type == "cuda" else None

    def put(self, x: Tensor) -> Tensor:
        """Copy a flat tensor to the host; on a GPU beside its other work."""
        waiting = self._free.get(x.nbytes)
        raw = waiting.pop() if waiting else self.memory.zeros(x.nbytes, torch.uint8)
        buffer = raw.view(x.dtype)
        if self._aside is None:
            return buffer.copy_(x)
        self._aside.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._aside):
            buffer.copy_(x, non_blocking=True)
        x.record_stream(self._aside)
        return buffer

    def get(self, buffer: Tensor) -> Tensor:
        """Bring back what `put` took; the buffer is free from here on."""
        x = torch.empty(buffer.shape, dtype=buffer.dtype, device=self.memory.device)
        if self._aside is not None:
            torch.cuda.current_stream(x.device).wait_stream(self._aside)
        x.copy_(buffer, non_blocking=True)
        if self._aside is not None:
            self._aside.wait_stream(torch.cuda.current_stream(x.device))
        self._free.setdefault(buffer.nbytes, []).append(buffer.view(torch.uint8))
        return x


def memory_of(layout: Layout, device: torch.device, folder: str) -> Memory:
    """Where a layout keeps the state of its units.

    Args:
        layout: its `offload` says it.
        device: of this rank.
        folder: for files; empty means the system's own folder for such.
    """
    if layout.offload.nvme:
        return OnDisk(device, folder)
    return OnHost(device) if layout.offload.optimizer else OnDevice(device)
