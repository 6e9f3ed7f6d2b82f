"""Write the script that starts a run on a cluster, and submit it if asked to.

  phalanx launch slurm run.toml --nodes 4 --time 12:00:00 --partition gpu
  phalanx launch slurm run.toml --nodes 4 --submit --set recipe.steps=5000
  phalanx launch k8s run.toml --nodes 4 --image registry/phalanx:1 --volume runs

Ranks are shared out evenly over the nodes, each with a GPU unless --cpu is given. A Slurm job is
asked to save before its time limit, and queued again until the run is done; a JobSet goes on after
a preemption. Machine 0 decides about restarts, and all machines see the folder of runs.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.api.launching import Training, jobset_manifest, slurm_script, submit
from phalanx.core.errors import PhalanxError, UsageError

KINDS = ("slurm", "k8s")
ONLY = {
    "slurm": ("time", "partition", "account", "qos", "sbatch", "setup", "cpus_per_rank"),
    "k8s": ("image", "volume", "namespace"),
}


def arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes."""
    add = parser.add_argument
    add("kind", choices=KINDS, help="the cluster: slurm, or k8s (a JobSet)")
    add("run_file", type=Path, metavar="RUN.toml", help="what to train")
    add("--nodes", type=int, required=True, metavar="N", help="machines; ranks are shared out")
    add("--layout", default="", help="how to cut a step, instead of the file's")
    add(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="any value of a run file, over everything else; may be repeated",
    )
    add("--name", default="", help="of the run's folder and the job; by default the file's")
    add("--runs-dir", default="runs", help="where runs are written, seen by all machines (./runs)")
    add("--python", metavar="PATH", help="the interpreter there (this one; k8s: python)")
    add("--cpu", action="store_true", help="ask for no GPUs")
    warning = "seconds before the end at which the run is asked to save (300)"
    add("--warning", type=int, default=300, metavar="SECONDS", help=warning)
    add("-o", "--output", type=Path, metavar="FILE", help="write it there, not to the screen")
    add("--submit", action="store_true", help="hand it to sbatch or kubectl")
    add("--json", action="store_true", help="print one JSON document")
    slurm = parser.add_argument_group("slurm")
    slurm.add_argument("--time", help="limit: 90, 12:00:00 or 2-00:00:00")
    for option in ("partition", "account", "qos"):
        slurm.add_argument(f"--{option}", help=f"the job's {option}")
    more = "any other option of sbatch, without its dashes; may be repeated"
    slurm.add_argument("--sbatch", action="append", metavar="NAME=VALUE", help=more)
    lines = "a line of shell before the run starts, such as 'module load cuda'; may be repeated"
    slurm.add_argument("--setup", action="append", metavar="LINE", help=lines)
    slurm.add_argument("--cpus-per-rank", type=int, metavar="N", help="cores of each rank")
    k8s = parser.add_argument_group("k8s")
    k8s.add_argument("--image", help="container with phalanx[train] in it")
    volume = "claim of a volume that all pods can write; it is mounted at /work"
    k8s.add_argument("--volume", metavar="CLAIM", help=volume)
    k8s.add_argument("--namespace", help="of the JobSet")


def run(args: Namespace) -> int:
    """Write the script; submit it if asked to."""
    _refuse_foreign(args)
    python = args.python or ("python" if args.kind == "k8s" else sys.executable)
    training = Training(
        run_file=args.run_file,
        nodes=args.nodes,
        name=args.name,
        runs_dir=args.runs_dir,
        layout=args.layout,
        sets=tuple(args.sets),
        python=python,
    )
    made = slurm_script if args.kind == "slurm" else jobset_manifest
    script = made(training, gpus=not args.cpu, warning=args.warning, **_asked(args))
    if args.output or args.submit:
        ending = "sbatch" if args.kind == "slurm" else "yaml"
        path = args.output or Path(f"{training.run_name}.{ending}")
        script = replace(script, path=_write(path, script.text))
    if args.submit:
        script = replace(script, job=submit(script))
    if args.json:
        print(json.dumps(script.to_dict()))
    elif script.job:
        print(f"submitted {script.path} as {script.job}")
    elif script.path:
        program = "sbatch" if args.kind == "slurm" else "kubectl apply -f"
        print(f"wrote {script.path}; read it, then: {program} {script.path}")
    else:
        print(script.text, end="")
    return 0


def _refuse_foreign(args: Namespace) -> None:
    """An option of the other kind would be lost without a word."""
    for kind, names in ONLY.items():
        for name in names:
            if kind != args.kind and getattr(args, name) is not None:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} goes with launch {kind}, not with {args.kind}")


def _asked(args: Namespace) -> dict[str, Any]:
    """What is asked of the cluster, in the words of its job."""
    if args.kind == "k8s":
        found = {"image": args.image or "", "claim": args.volume or ""}
        return found | ({"namespace": args.namespace} if args.namespace else {})
    options = {name: getattr(args, name) for name in ("partition", "account", "qos")}
    for text in args.sbatch or ():
        name, _, value = text.removeprefix("--").partition("=")
        options[name] = value
    return {
        "time": args.time or "",
        "options": {name: value for name, value in options.items() if value is not None},
        "setup": tuple(args.setup or ()),
        "cpus_per_rank": args.cpus_per_rank or 0,
    }


def _write(path: Path, text: str) -> str:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PhalanxError(f"cannot write {path}: {error.strerror}; choose another -o") from error
    return str(path)
