"""What a run runs on: versions, processor, cores, memory, git commit. Names no machine."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from phalanx.core.layout import Layout
from phalanx.trainer.run.cores import num_cores

PACKAGES = ("phalanx", "torch", "numpy", "safetensors")


def describe_environment(layout: Layout, device: torch.device) -> dict[str, Any]:
    """The contents of `env.json`.

    Args:
        layout: how the step is cut.
        device: of this rank; the others are taken to be alike.
    """
    return {
        "layout": str(layout),
        "ranks": layout.ranks,
        "device": device_name(device),
        "accelerators_here": torch.cuda.device_count() if device.type == "cuda" else 0,
        "cpu": cpu_model(),
        "cores": num_cores(),
        "memory_bytes": _memory_bytes(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "git": git_state(Path.cwd()),
    }


def device_name(device: torch.device) -> str:
    """What the device calls itself: `NVIDIA H200`, or the name of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()


def cpu_model() -> str:
    """The processor's name, as the system knows it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit that is checked out in `folder`, and whether files differ from it; else None."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "modified": bool(changes)}


def _git(folder: Path, *words: str) -> str | None:
    command = ["git", "-C", str(folder), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
