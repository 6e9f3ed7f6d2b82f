"""A batch script for Slurm: one launcher per node, a signal before the limit, a requeue on 75."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.core.errors import UsageError

LEAST_WARNING = 60  # seconds; Slurm looks at limits about once a minute
SAVING_ENDS = 30  # seconds before the limit, so that 75 is said before Slurm ends the step
_VALUE = re.compile(r"[\w.,:;=@%+/\[\]*-]+")
_TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}")


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What Slurm is asked for.

    Attributes:
        name: of the job.
        nodes: how many machines.
        ranks_per_node: processes that the launcher of each starts.
        gpus: whether each rank takes a GPU; else none is asked for.
        cpus_per_rank: cores; 0 leaves them to the cluster where there are GPUs, and is 1 without.
        time: limit, as Slurm writes it: minutes, `HH:MM:SS`, `D-HH:MM:SS`; empty for the default.
        warning: seconds before the limit at which the run is asked to save.
        folder: where the job runs.
        options: more of sbatch: its name and value each, such as partition and account.
        setup: lines of shell before the run starts, such as `module load cuda`.
        command: the training, but for what the script adds.
    """

    name: str
    nodes: int
    ranks_per_node: int
    gpus: bool = True
    cpus_per_rank: int = 0
    time: str = ""
    warning: int = 300
    folder: str
    options: Mapping[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    command: tuple[str, ...]

    def __post_init__(self) -> None:
        """Reject what sbatch would not read, or would read as something else."""
        if self.time and not _TIME.fullmatch(self.time):
            raise UsageError(f"--time is {self.time!r}; write 90, 12:00:00 or 2-00:00:00")
        if self.warning < LEAST_WARNING:
            raise UsageError(
                f"--warning is {self.warning} s; it is at least {LEAST_WARNING}, since Slurm looks "
                "at its limits once a minute"
            )
        for key, value in (("job-name", self.name), *self.options.items()):
            if not re.fullmatch(r"[a-z][a-z-]*", key) or not _VALUE.fullmatch(value):
                raise UsageError(
                    f"sbatch cannot read {key + '=' + value!r} from a script; use letters, "
                    "digits and any of . _ , : ; = @ % + / - [ ] *"
                )
        for line in (self.folder, *self.setup):
            if "\n" in line or "\r" in line:
                raise UsageError(f"{line!r} has more than one line")

    @property
    def cores(self) -> int:
        """Of each machine; 0 leaves them to the cluster, which knows how many go with a GPU."""
        return (self.cpus_per_rank or (0 if self.gpus else 1)) * self.ranks_per_node

    def to_script(self) -> str:
        """The text of the script, for sbatch."""
        parts = [
            "#!/bin/bash",
            *(f"#SBATCH --{option}" for option in self._directives()),
            "",
            *_HEAD,
            f"cd {shlex.quote(self.folder)} || exit 2",
            *self.setup,
            *_MEET,
            *(('export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',) if self.cores else ()),
            "",
            "srun --kill-on-bad-exit=0 \\",
            *_folded(self.command),
            *_END,
        ]
        return "\n".join(parts) + "\n"

    def _directives(self) -> Iterator[str]:
        yield f"job-name={self.name}"
        yield f"nodes={self.nodes}"
        yield "ntasks-per-node=1"
        if self.gpus:
            yield f"gpus-per-node={self.ranks_per_node}"
        if self.cores:
            yield f"cpus-per-task={self.cores}"
        if self.time:
            yield f"time={self.time}"
        yield f"signal=USR1@{self.warning}"
        yield "requeue"
        yield "open-mode=append"
        yield "output=%x-%j.out"
        for key, value in self.options.items():
            yield f"{key}={value}"


def _folded(command: Sequence[str]) -> Iterator[str]:
    """A command over several lines, one for each option."""
    lines: list[list[str]] = [[]]
    for word in command:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(shlex.quote(word))
    for line in lines[:-1]:
        yield f"  {' '.join(line)} \\"
    yield f"  {' '.join(lines[-1])}"


_HEAD = (
    "# One launcher per node starts the ranks of its node, and starts them again if one dies.",
    "# Before the time limit Slurm sends USR1: the run saves, ends with 75, and is queued again.",
    "set -u",
)
_MEET = (
    "",
    "# Launchers meet at the first node, by its address: its name need not resolve.",
    'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    "MASTER_ADDR=$(scontrol show node \"$first\" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')",
    "MASTER_PORT=$((15000 + SLURM_JOB_ID % 15000))",
    "export MASTER_ADDR MASTER_PORT",
)
_END = (
    "code=$?",
    "",
    "# 75: it has saved and can go on. A job that somebody cancelled stays cancelled.",
    'state=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)',
    'if [ "$code" -eq 75 ] && [ "$state" = RUNNING ]; then',
    '  scontrol requeue "$SLURM_JOB_ID"',
    "fi",
    'exit "$code"',
)
