"""Write a trained model as a folder that Hugging Face Transformers loads.

phalanx export runs/demo out/demo
phalanx export runs/demo/checkpoints/step-00000100 out/demo-100 --precision bf16
"""

import json
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

from phalanx.api.runfile import load_run
from phalanx.core.errors import RefusedError, UsageError
from phalanx.core.model import ModelShape
from phalanx.core.run import Run
from phalanx.data.tokenizer_files import write_tokenizer

SCHEMA = 1
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")


def arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes; the help text is the documentation."""
    parser.add_argument(
        "source",
        type=Path,
        metavar="RUN",
        help="the folder of a run, for its newest checkpoint, or one of its checkpoints",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="to make")
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="fp32", help="of the weights (default fp32)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: Namespace) -> int:
    """Find the checkpoint, write the folder, say what loads it.

    Raises:
        UsageError: there is no such run or checkpoint, or none yet.
        RefusedError: no model of Transformers computes what this one does, or the folder is in use.
        CheckpointError: the checkpoint cannot be trusted.
    """
    import torch

    from phalanx.trainer.model.families import family_of
    from phalanx.trainer.model.huggingface import export_hf
    from phalanx.trainer.precision.dtypes import Dtypes
    from phalanx.trainer.run.trained import open_checkpoint, reads_bytes, tokenizer_home

    run = load_run(_home(args.source) / "run.toml")
    shape = _reaching(run)
    if shape.is_moe and run.recipe.balance_speed and not family_of(shape).router_bias:
        raise RefusedError(
            "experts of this run are balanced by biases, which no model of Transformers that we "
            "write has a place for; train with recipe.balance_speed=0 to convert"
        )
    dtype = Dtypes.named(args.precision, torch.device("cpu")).compute
    with open_checkpoint(args.source) as checkpoint:
        family = export_hf(
            checkpoint.tensor, shape, args.folder, dtype, Path(run.weights) if run.weights else None
        )
        step = checkpoint.step
    home = tokenizer_home(run)
    if home is not None or reads_bytes(run):
        write_tokenizer(home, args.folder)
    size = sum(file.stat().st_size for file in args.folder.iterdir())
    if args.json:
        document = {
            "schema": SCHEMA,
            "step": step,
            "folder": str(args.folder),
            "architecture": family.architecture,
            "parameters": shape.params(),
            "bytes": size,
        }
        print(json.dumps(document))
        return 0
    print(
        f"{args.folder}: {shape.params():,} parameters after step {step}, "
        f"{size / 1e6:,.1f} MB in {args.precision}\n"
        f'load it: transformers.{family.architecture}.from_pretrained("{args.folder}")'
    )
    return 0


def _reaching(run: Run) -> ModelShape:
    """The model, said to reach at least as far as the sequences that it was trained on."""
    shape = run.model
    if shape.positions == "learned" or shape.rope.kind == "dynamic":
        return shape
    return replace(shape, max_positions=max(shape.max_positions, run.recipe.seq))


def _home(source: Path) -> Path:
    """The folder of the run that a source belongs to."""
    for home in (source, source.absolute().parent.parent):
        if (home / "run.toml").is_file():
            return home
    raise UsageError(
        f"{source} is neither a run nor one of its checkpoints; "
        "give a folder with a run.toml in it, such as runs/NAME"
    )
