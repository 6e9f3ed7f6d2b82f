"""What a training run tells about itself, as values: nothing here prints.

The trainer calls a `Reporter` on rank 0 only. The command line owns the ones that write to a
terminal; a caller that wants to watch a run from Python passes its own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from phalanx.core.html import html_table
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.units import show_bytes, show_seconds, show_share


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What is known before the first step.

    Attributes:
        name: of the run directory; empty when nothing is written.
        directory: where the run is written; empty when nothing is.
        model: sizes, vocabulary as it is really used.
        weights: the folder that its first weights come from; empty where they are drawn.
        layout: how the step is cut.
        precision: of the matrix products, resolved, as layouts write it.
        stages: blocks on each pipeline stage.
        micro_batches: per rank and step.
        parameters: of the whole model, tied tables counted once.
        tokens_per_step: in the global batch.
        first_step: the first step to run; above 0 after a resume.
        steps: the step after which training stops.
        device: what computes, for example "4 ranks on 2 CPU cores".
        corpus: what is learned from, in a few words with its size.
        bytes_per_token: of the corpus; 0 or nan where unknown: then nothing is said per byte.
        peak_flops: FLOP/s of all ranks together that utilisation is measured against, or None.
        peak_source: where the peak comes from, or why there is none.
        attempt: which start of the run this is, from 0; later ones need no introduction.
    """

    name: str = ""
    directory: str = ""
    model: ModelShape
    weights: str = ""
    layout: Layout
    precision: str
    stages: tuple[int, ...]
    micro_batches: int
    parameters: int
    tokens_per_step: int
    first_step: int = 0
    steps: int
    device: str
    corpus: str
    bytes_per_token: float = 0.0
    peak_flops: float | None = None
    peak_source: str = ""
    attempt: int = 0


class Validation(NamedTuple):
    """What was measured on held-out text.

    Attributes:
        step: how many steps were done.
        loss: nats per token, mean over tokens of the plain loss.
        seconds: that it took.
    """

    step: int
    loss: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """One entry of `validations` in `summary.json`."""
        return {"step": self.step, "loss": finite(self.loss), "seconds": self.seconds}


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What one optimizer step measured, over all ranks.

    Attributes:
        step: how many steps are done with this one, from 1.
        steps: the step after which training stops.
        loss: nats per valid token of the global batch.
        grad_norm: global, before clipping.
        learning_rate: that this step used.
        tokens: in this step, over all ranks.
        time: when it was done, in seconds since 1970.
        seconds: that this step took, data wait included; what lies between steps is not in it.
        tokens_per_second: over all ranks.
        flops_per_second: achieved by all ranks together, by the model's own FLOPs (no recompute).
        mfu, hfu: shares of the peak, without and with recompute; None where the peak is unknown.
        data_wait_seconds: that the slowest rank waited for its batch.
        exposed_seconds: that some rank stood still for messages, by axis; what hides behind
            computation is not in it.
        peak_bytes: most memory held by any rank so far.
        skipped: the update was not applied (its loss or gradient was not finite).
        loss_scale: what the loss was multiplied with before backward; 1 but for fp16.
        expert_load: visits of the busiest expert over those of an even load, in the layer where
            that is most; None without experts.
        expert_dropped: share of the visits that found their expert full, likewise.
        seconds_left: until the last step, at the present speed.
        goodput: share of the run's time so far, over all of its starts, that has become training.
    """

    step: int
    steps: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    time: float = 0.0
    seconds: float
    tokens_per_second: float
    flops_per_second: float
    mfu: float | None = None
    hfu: float | None = None
    data_wait_seconds: float = 0.0
    exposed_seconds: Mapping[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    skipped: bool = False
    loss_scale: float = 1.0
    expert_load: float | None = None
    expert_dropped: float | None = None
    seconds_left: float = 0.0
    goodput: float | None = None

    def to_json(self) -> dict[str, Any]:
        """One line of `metrics.jsonl`; docs/json.md says what each field is."""
        return {
            "step": self.step,
            "time": self.time,
            "loss": finite(self.loss),
            "grad_norm": finite(self.grad_norm),
            "lr": self.learning_rate,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "flops_per_second": self.flops_per_second,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "data_wait_seconds": self.data_wait_seconds,
            "exposed_seconds": dict(self.exposed_seconds),
            "peak_bytes": self.peak_bytes,
            "skipped": self.skipped,
            "loss_scale": self.loss_scale,
            "expert_load": self.expert_load,
            "expert_dropped": self.expert_dropped,
            "goodput": self.goodput,
            "validation_loss": None,
            "validation_seconds": None,
        }


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run comes to, when it ends or is interrupted.

    Example:
        >>> from pathlib import Path
        >>> from phalanx.trainer.run.rundir import RunDirectory
        >>> RunDirectory(Path("runs/demo")).summary_file.name  # where a run keeps its own
        'summary.json'

    Attributes:
        name, directory: of the run; empty when nothing was written.
        layout: the line that `Layout.parse` reads.
        parameters: of the whole model.
        first_step: the first step of this session, from 0.
        last_step: steps done in all.
        steps: steps that were asked for.
        interrupted: stopped by a signal after saving; `--resume auto` goes on.
        first_loss, last_loss: nats per token; each the mean of `averaged_steps` steps at that end,
            and nan where no step was left to take.
        averaged_steps: of how many.
        losses: of every step of this session, in order.
        validation_loss: on held-out text, nats per token, after the last step; None where
            nothing was measured then.
        validations: all of this session.
        bytes_per_token: of the corpus; 0 or nan where unknown.
        tokens: seen in this session, over all ranks.
        seconds: of this session from its first step on, validation and saving included.
        tokens_per_second: over all ranks, median over steps.
        flops_per_second: achieved by all ranks together, without recompute.
        mfu, hfu: shares of the peak, or None.
        convention: how FLOPs and peak were counted, or why there is no MFU.
        time_split: those seconds by name (compute, waiting for an axis, validation, ...), mean
            over ranks.
        stragglers: what was told of ranks that were slow.
        goodput: share of the run's time, over all of its starts, that has become training.
        lost_seconds: the rest of it, by what it went to: restarting, steps done twice, ...
        restart_seconds: from a failure until ranks trained again, mean; None where nothing failed.
        checkpoint_write_seconds: that a save stops training, mean over those of this session.
        peak_bytes: most memory held by any rank.
        checkpoints: paths of those that are kept, oldest first.
        sample: a little generated text, or empty.
        proof: one line on how the layout compared with one device, or empty.
        next_steps: commands worth trying now, each with a few words of why.
    """

    name: str = ""
    directory: str = ""
    layout: str
    parameters: int
    first_step: int = 0
    last_step: int
    steps: int
    interrupted: bool = False
    first_loss: float
    last_loss: float
    averaged_steps: int = 1
    losses: tuple[float, ...] = ()
    validation_loss: float | None = None
    validations: tuple[Validation, ...] = ()
    bytes_per_token: float = 0.0
    tokens: int
    seconds: float
    tokens_per_second: float
    flops_per_second: float
    mfu: float | None = None
    hfu: float | None = None
    convention: str = ""
    time_split: Mapping[str, float] = field(default_factory=dict)
    goodput: float | None = None
    lost_seconds: Mapping[str, float] = field(default_factory=dict)
    restart_seconds: float | None = None
    checkpoint_write_seconds: float | None = None
    stragglers: tuple[str, ...] = ()
    peak_bytes: int = 0
    checkpoints: tuple[str, ...] = ()
    sample: str = ""
    proof: str = ""
    next_steps: tuple[tuple[str, str], ...] = ()

    def bits_per_byte(self, loss: float | None) -> float | None:
        """A loss in nats per token, as bits per byte of text; None where it cannot be said."""
        if loss is None or not self.bytes_per_token > 0:
            return None
        return loss / math.log(2) / self.bytes_per_token

    def to_dict(self) -> dict[str, Any]:
        """The document of `summary.json` and of `--json`."""
        values = {key: getattr(self, key) for key in self.__dataclass_fields__ if key != "losses"}
        return {
            "schema": 1,
            **values,
            "first_loss": finite(self.first_loss),
            "last_loss": finite(self.last_loss),
            "validation_loss": finite(self.validation_loss),
            "bytes_per_token": finite(self.bytes_per_token),
            "first_bits_per_byte": finite(self.bits_per_byte(self.first_loss)),
            "last_bits_per_byte": finite(self.bits_per_byte(self.last_loss)),
            "validation_bits_per_byte": finite(self.bits_per_byte(self.validation_loss)),
            "validations": [found.to_json() for found in self.validations],
            "time_split": dict(self.time_split),
            "lost_seconds": dict(self.lost_seconds),
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "Summary":
        """Read what `to_dict` gives back; the losses of the single steps are not in it."""
        kept = {key: value for key, value in document.items() if key in cls.__dataclass_fields__}
        for key in ("first_loss", "last_loss"):
            kept[key] = math.nan if kept[key] is None else kept[key]
        kept["bytes_per_token"] = kept["bytes_per_token"] or 0.0
        kept["validations"] = tuple(
            Validation(**{**found, "loss": math.nan if found["loss"] is None else found["loss"]})
            for found in kept["validations"]
        )
        kept["checkpoints"] = tuple(kept["checkpoints"])
        kept["stragglers"] = tuple(kept.get("stragglers", ()))
        kept["next_steps"] = tuple((command, why) for command, why in kept["next_steps"])
        return cls(**kept)

    def _repr_html_(self) -> str:
        """The summary as a table, for a notebook."""
        mfu = "unknown" if self.mfu is None else show_share(self.mfu)
        rows = [
            ("layout", self.layout),
            ("steps", f"{self.last_step:,} of {self.steps:,}"),
            ("loss", f"{self.first_loss:.4g} to {self.last_loss:.4g} nats per token"),
            ("time", show_seconds(self.seconds)),
            ("speed", f"{self.tokens_per_second:,.0f} tokens/s, MFU {mfu}"),
            ("memory", f"{show_bytes(self.peak_bytes, binary=True)} at most on a rank"),
            ("folder", self.directory),
        ]
        return html_table(f"trained {self.name}", rows)


class Reporter(Protocol):
    """Who watches a run. Called on rank 0, in the order below; none of them may raise."""

    def on_start(self, info: RunInfo) -> None:
        """Training is about to begin."""

    def on_step(self, metrics: StepMetrics) -> None:
        """One optimizer step is done."""

    def on_validation(self, step: int, loss: float) -> None:
        """The held-out text was measured.

        Args:
            step: how many steps were done.
            loss: nats per token.
        """

    def on_event(self, text: str) -> None:
        """Something worth one line happened: a checkpoint was saved, or set aside."""

    def on_end(self, summary: Summary) -> None:
        """Training is over, or was interrupted after saving."""


class Silent:
    """A reporter that says nothing: other ranks, and tests."""

    def on_start(self, info: RunInfo) -> None:
        """Say nothing."""

    def on_step(self, metrics: StepMetrics) -> None:
        """Say nothing."""

    def on_validation(self, step: int, loss: float) -> None:
        """Say nothing.

        Args:
            step: how many steps were done.
            loss: nats per token.
        """

    def on_event(self, text: str) -> None:
        """Say nothing."""

    def on_end(self, summary: Summary) -> None:
        """Say nothing."""


def finite(value: float | None) -> float | None:
    """JSON has no infinities: what is not finite becomes null."""
    return value if value is not None and math.isfinite(value) else None
