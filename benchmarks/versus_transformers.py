"""One process: our step against Hugging Face Transformers' Llama of the same shape and weights.

Both must give the same logits for the same weights, which travel through an exported folder.
Bar: at least as fast. Transformers is needed only here: pip install 'phalanx[bench]'.

python benchmarks/versus_transformers.py [--kv-heads 2] [--tied]
"""

import tempfile
from pathlib import Path

import torch
from measure import describe, options, race, run_of, show
from ours import Trainer, initial_weights, stream_of
from plain import Loop
from torch import Tensor
from transformers import LlamaForCausalLM

from phalanx.core.run import Run
from phalanx.trainer.engine.batching import micro_batches
from phalanx.trainer.model.huggingface import export_hf


def main() -> None:
    """Compare the logits, then race the two."""
    args = options(__doc__, threads=2).parse_args()
    torch.set_num_threads(args.threads)
    run = run_of(args, "dp=1 precision=fp32")
    trainer, model = Trainer(run), transformers_model(run)
    difference = difference_of_logits(trainer, model)
    loop = Loop(
        model,
        run.recipe,
        run.layout.mb,
        logits=lambda tokens: model(input_ids=tokens, use_cache=False).logits,
    )
    stream = stream_of(run)
    ours: list[float] = []
    theirs: list[float] = []

    def transformers() -> None:
        step = len(theirs)
        theirs.append(loop.step(step, stream.batch(step, range(run.recipe.batch))))

    contenders = {"transformers": transformers, "phalanx": lambda: ours.append(trainer())}
    results = race(contenders, "transformers", args.rounds)
    worst = max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))
    title = (
        f"fp32, {args.threads} threads, {describe(run)}; logits differ {difference:.1e}, "
        f"losses {worst:.1e}"
    )
    show(title, results, run.recipe.tokens_per_step, args.json)
    if difference > 1e-5 or worst > 1e-4:
        raise SystemExit("the two did not compute the same")


def transformers_model(run: Run) -> LlamaForCausalLM:
    """Transformers' Llama with our initial weights, through a folder."""
    weights = dict(initial_weights(run))
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        export_hf(weights.__getitem__, run.model, folder)
        model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.train()


def difference_of_logits(trainer: Trainer, model: LlamaForCausalLM) -> float:
    """The largest difference, relative to the largest logit, on one micro-batch."""
    engine = trainer.engine
    size, seq = engine.run.layout.mb, engine.run.recipe.seq
    batch = trainer.stream.batch(0, engine.positions())
    first = micro_batches(engine, 0, batch)[0]
    ours: Tensor | None = engine.forward_executor(1, size, seq).infer(first)
    if ours is None:
        raise SystemExit("one process holds the last stage")
    with torch.no_grad():
        theirs = model(input_ids=first.tokens.t(), use_cache=False).logits
    return ((ours.transpose(0, 1) - theirs).abs().max() / theirs.abs().max()).item()


if __name__ == "__main__":
    main()
