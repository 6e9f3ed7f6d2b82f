"""Scripts that start a run on a cluster: written, shown, and submitted where somebody asks for it.

Every machine runs `phalanx train --nodes N`: its ranks start and end with those of the others, and
start again if one dies. The same line starts and resumes, so that a job which is queued again goes
on where it was.
"""

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.api.jobset import KubernetesJob
from phalanx.api.runfile import load_run
from phalanx.api.slurm import SAVING_ENDS, SlurmJob
from phalanx.core.errors import PhalanxError, RefusedError, UsageError, divisors, shorten
from phalanx.core.run import Run
from phalanx.trainer.run.limits import refuse_untrainable
from phalanx.trainer.run.rundir import require_name

SCHEMA = 1


@dataclass(frozen=True)
class LaunchScript:
    """What `phalanx launch` writes.

    Attributes:
        kind: slurm, or k8s.
        text: of the script or the manifest.
        nodes: machines.
        ranks: of the run, over all of them.
        path: where it was written; empty where it was not.
        job: what the cluster calls it; empty where it was not submitted.

    Example:
        >>> LaunchScript("slurm", "#!/bin/bash", nodes=2, ranks=16).to_dict()["ranks"]
        16
    """

    kind: str
    text: str
    nodes: int
    ranks: int
    path: str = ""
    job: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The document that `phalanx launch --json` prints."""
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "nodes": self.nodes,
            "ranks": self.ranks,
            "path": self.path,
            "job": self.job,
            "script": self.text,
        }


@dataclass(frozen=True, kw_only=True)
class Training:
    """The run that a cluster starts.

    Attributes:
        run_file: its path; relative ones are taken from the folder that the job runs in.
        nodes: machines that share its ranks evenly.
        name: of the run's folder; empty for that of the file.
        runs_dir: the folder of all runs, which all machines see.
        layout: instead of the file's; empty for that.
        sets: `section.key=value`, over everything else.
        python: the interpreter there.
    """

    run_file: Path
    nodes: int
    name: str = ""
    runs_dir: str = "runs"
    layout: str = ""
    sets: tuple[str, ...] = ()
    python: str = sys.executable

    @property
    def run_name(self) -> str:
        """What the run's folder and the job are called."""
        return require_name(self.name or self.run_file.stem)

    def read(self) -> Run:
        """The run, whose ranks the machines share evenly.

        Raises:
            UsageError: it cannot be read.
            RefusedError: it cannot be trained, or its ranks cannot be shared out evenly.
        """
        if self.nodes < 1:
            raise UsageError(f"--nodes is {self.nodes}; it is at least 1")
        run = load_run(self.run_file, layout=self.layout or None, sets=self.sets)
        refuse_untrainable(run)
        ranks = run.layout.ranks
        if ranks % self.nodes:
            raise RefusedError(
                f"the {ranks} ranks of {run.layout} cannot be shared out evenly over --nodes "
                f"{self.nodes}; it can be {shorten(divisors(ranks))}"
            )
        return run

    def command(self, more: Sequence[str] = ()) -> tuple[str, ...]:
        """The command line of each machine, but for which one it is.

        Args:
            more: words to add.
        """
        words = [self.python, "-m", "phalanx", "train", str(self.run_file)]
        words += ["--name", self.run_name, "--runs-dir", self.runs_dir, "--resume", "auto"]
        words += ["--layout", self.layout] if self.layout else []
        for text in self.sets:
            words += ["--set", text]
        return (*words, *more)


def slurm_script(training: Training, **asked: Any) -> LaunchScript:
    """A batch script for Slurm.

    Args:
        training: what is run.
        asked: attributes of `SlurmJob`, such as time, options and setup.

    Raises:
        UsageError: a value that sbatch would not read, or the run file cannot be read.
        RefusedError: the run cannot be trained so.
    """
    run = training.read()
    warning = asked.get("warning", SlurmJob.warning)
    grace = [] if run.recipe.grace else ["--set", f"recipe.grace={warning - SAVING_ENDS}"]
    more = [*grace, *(["--nodes", str(training.nodes)] if training.nodes > 1 else [])]
    job = SlurmJob(
        name=training.run_name.replace(" ", "-"),
        nodes=training.nodes,
        ranks_per_node=run.layout.ranks // training.nodes,
        folder=str(Path.cwd()),
        command=training.command(more),
        **asked,
    )
    return LaunchScript("slurm", job.to_script(), training.nodes, run.layout.ranks)


def jobset_manifest(training: Training, **asked: Any) -> LaunchScript:
    """A JobSet for Kubernetes.

    Args:
        training: what is run; its paths are those of the container.
        asked: attributes of `KubernetesJob`: image and claim at least.

    Raises:
        UsageError: a name that Kubernetes would not take, or the run file cannot be read.
        RefusedError: the run cannot be trained so.
    """
    run = training.read()
    job = KubernetesJob(
        name=training.run_name.lower().replace("_", "-"),
        nodes=training.nodes,
        ranks_per_node=run.layout.ranks // training.nodes,
        command=training.command(),
        **asked,
    )
    return LaunchScript("k8s", job.to_yaml(), training.nodes, run.layout.ranks)


SUBMIT: Mapping[str, tuple[str, ...]] = {
    "slurm": ("sbatch", "--parsable"),
    "k8s": ("kubectl", "apply", "--output", "name", "--filename"),
}


def submit(script: LaunchScript) -> str:
    """Hand a script that was written to the cluster.

    Args:
        script: with its path.

    Returns:
        What the cluster calls the job.

    Raises:
        PhalanxError: the cluster's program is not here, or refuses it.
    """
    program, *words = SUBMIT[script.kind]
    if shutil.which(program) is None:
        raise PhalanxError(f"{program} is not installed here; submit {script.path} where it is")
    command = [program, *words, script.path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        told = " ".join((done.stderr or done.stdout).split())
        raise PhalanxError(f"{program} refuses {script.path}: {told}")
    return done.stdout.strip().partition(";")[0]
