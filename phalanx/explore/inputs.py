"""What can be changed on the page: one schema, of which scrubbers, URL keys and checks are made.

An input is a number on a linear, logarithmic or binary scale, one of several words, or a text. Most
defaults are facts of the model and of the accelerator that are chosen, so that a link names only
what was changed.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from phalanx.core.errors import PhalanxError, UsageError
from phalanx.core.units import parse_count
from phalanx.explore.presets import (
    ACCELERATORS,
    MODELS,
    RECIPES,
    SCHEDULES,
    chip_facts,
    model_facts,
)

Value = float | int | str
Scale = Literal["linear", "log", "binary"]

PER_DECADE = 40  # steps of a logarithmic scale to a factor of ten
DIGITS = 3  # that a step keeps
FURTHEST = 600  # steps at once: further than any range


class Input(NamedTuple):
    """One thing that can be changed.

    Attributes:
        key: in the URL and on the command line.
        label: the letter or word that the page prints before it.
        help: what it means, in one line.
        unit: of the number; empty for counts.
        default: where neither model nor accelerator says; see `default_of`.
        low, high: the range of a number.
        scale: how far one step goes.
        step: of a linear scale; of a logarithmic one, what values are multiples of.
        whole: whether only whole numbers make sense.
        choices: words, one of which it is.
        group: under which heading it stands.
    """

    key: str
    label: str
    help: str
    unit: str = ""
    default: Value = 1
    low: float = 1
    high: float = 1
    scale: Scale = "log"
    step: float = 1
    whole: bool = True
    choices: tuple[str, ...] = ()
    group: str = "step"

    @property
    def kind(self) -> Literal["number", "choice", "text"]:
        """What kind of value it has."""
        if self.choices:
            return "choice"
        return "text" if isinstance(self.default, str) else "number"

    def to_dict(self) -> dict[str, Any]:
        """The input as `GET /api/v1/inputs` lists it."""
        return {**self._asdict(), "kind": self.kind, "choices": list(self.choices)}


def _degree(key: str, label: str, text: str, default: int, high: float = 65536) -> Input:
    """A number of ranks, which doubles with a step."""
    return Input(key, label, text, "", default, 1, high, "binary", group="layout")


def _size(key: str, label: str, text: str, high: float, step: float = 1) -> Input:
    """A size of the model."""
    scale: Scale = "log" if high > 2000 else "linear"
    return Input(key, label, text, "", 1, 1, high, scale, step, group="model")


def _rate(key: str, label: str, text: str, unit: str, low: float, high: float) -> Input:
    """A number of the hardware."""
    return Input(key, label, text, unit, low, low, high, "log", 1, False, group="hardware")


def _word(key: str, label: str, text: str, choices: Sequence[str], group: str) -> Input:
    """One of several words; the first is the default."""
    return Input(key, label, text, default=choices[0], choices=tuple(choices), group=group)


def _cost(key: str, label: str, text: str) -> Input:
    """A relative duration."""
    return Input(key, label, text, "", 1.0, 0, 8, "linear", 0.25, False, group="pipeline")


INPUTS: tuple[Input, ...] = (
    _word("model", "model", "a model of the catalog; sizes follow it", MODELS, "model"),
    _size("D", "D", "d_model: width of the residual stream", 131072, 64),
    _size("F", "F", "d_ff: width of the MLP, of one expert where there are several", 1048576, 64),
    _size("L", "L", "layers", 512),
    _size("E", "E", "experts of a layer, shared ones included; 1 for a dense model", 1024),
    _size("k", "k", "experts that a token visits, shared ones included", 64),
    Input("s", "s", "shared experts", "", 0, 0, 16, "linear", group="model"),
    _size("heads", "heads", "query heads: tp must divide them", 1024),
    _word(
        "chip", "chip", "an accelerator of the catalog; rates follow it", ACCELERATORS, "hardware"
    ),
    _rate("C", "C", "dense bf16 FLOP/s of one chip", "FLOP/s", 1e12, 1e17),
    _rate(
        "W",
        "W_ici",
        "bytes/s of one chip into its fast fabric: one axis of a torus, both links; "
        "or NVLink egress, one way",
        "B/s",
        1e9,
        1e13,
    ),
    _rate("Wn", "W_dcn", "bytes/s of one chip into the network between domains", "B/s", 1e8, 1e13),
    _rate("M", "HBM", "bytes of memory of one chip", "B", 1e9, 1e13),
    Input(
        "G", "G", "chips that share one fast fabric", "", 8, 1, 65536, "binary", group="hardware"
    ),
    Input("B", "B", "tokens in one step, all chips together", "tokens", 8388608, 1024, 1e9),
    Input("seq", "seq", "tokens in one sequence", "tokens", 8192, 128, 4194304, "binary"),
    _degree("dp", "DP", "data-parallel ranks; with ZeRO-3, FSDP", 16),
    _degree("tp", "TP", "tensor-parallel ranks", 8, 4096),
    _degree("pp", "PP", "pipeline stages", 16, 1024),
    _degree("ep", "EP", "expert-parallel ranks, borrowed from DP", 1, 4096),
    _degree("cp", "CP", "ranks that share each sequence", 1, 4096),
    Input("mdp", "M_DP", "torus axes over which DP spreads", "", 2, 1, 3, "linear", group="layout"),
    Input("mtp", "M_TP", "torus axes over which TP spreads", "", 1, 1, 3, "linear", group="layout"),
    Input(
        "zero",
        "ZeRO",
        "what DP ranks shard: 0 nothing to 3 weights",
        "",
        1,
        0,
        3,
        "linear",
        group="layout",
    ),
    Input("mb", "mb", "sequences in a micro-batch", "", 1, 1, 1024, "binary", group="layout"),
    _word(
        "recompute",
        "recompute",
        "what backward computes again",
        ("none", "selective", "full"),
        "layout",
    ),
    Input(
        "more",
        "more",
        "other keys of a layout: shard=128 offload=activations",
        default="",
        group="layout",
    ),
    _word(
        "travels",
        "what travels",
        "weights (DP, FSDP) or activations (TP)",
        ("weights", "activations"),
        "view",
    ),
    _word(
        "scheme",
        "scheme",
        "which scheme is drawn",
        ("dp", "fsdp", "tp", "mixed", "pp", "ep"),
        "view",
    ),
    _word("recipe", "state", "bytes of training state for a parameter", RECIPES, "view"),
    _word(
        "schedule", "schedule", "order of micro-batches over the pipeline", SCHEDULES, "pipeline"
    ),
    _word(
        "beside",
        "beside",
        "a second schedule, to compare",
        (SCHEDULES[1], SCHEDULES[0], *SCHEDULES[2:]),
        "pipeline",
    ),
    Input("p", "p", "stages that are drawn", "", 4, 1, 64, "linear", group="pipeline"),
    Input("m", "m", "micro-batches that are drawn", "", 8, 1, 1024, "linear", group="pipeline"),
    Input(
        "v",
        "v",
        "chunks of layers to a rank; 0 for as few as the schedule can have",
        "",
        0,
        0,
        16,
        "linear",
        group="pipeline",
    ),
    _cost("F_", "forward", "duration of F"),
    _cost("I_", "input gradient", "duration of I"),
    _cost("W_", "weight gradient", "duration of W; B is I + W"),
    Input(
        "hop",
        "hop",
        "duration of carrying a tensor to the next rank",
        "",
        0.0,
        0,
        4,
        "linear",
        0.05,
        False,
        group="pipeline",
    ),
    Input(
        "slow",
        "slow stage",
        "a stage that takes longer; 0 for none, counted from 1",
        "",
        0,
        0,
        1024,
        "linear",
        group="pipeline",
    ),
    Input(
        "by",
        "times",
        "how many times as long the slow stage takes",
        "",
        1.5,
        1,
        8,
        "linear",
        0.1,
        False,
        group="pipeline",
    ),
    Input(
        "share",
        "MFU",
        "share of the peak that training reaches",
        "share",
        0.4,
        0.01,
        1,
        "linear",
        0.01,
        False,
        group="systems",
    ),
    Input(
        "hours",
        "device-hours per failure",
        "Llama 3: 419 interruptions of 16,384 GPUs in 54 days",
        "h",
        50676,
        1,
        1e8,
        group="systems",
    ),
    Input(
        "restart",
        "restart",
        "seconds from a failure to the first new step",
        "s",
        600,
        1,
        86400,
        group="systems",
    ),
    Input(
        "store",
        "storage",
        "bytes per second for checkpoints",
        "B/s",
        2e12,
        1e9,
        1e15,
        whole=False,
        group="systems",
    ),
    Input(
        "trained",
        "tokens to train on",
        "of the whole training",
        "tokens",
        15600000000000,
        1e9,
        1e16,
        group="systems",
    ),
    Input(
        "whynot",
        "why not",
        "a layout, or some keys of one, to hold against the best: tp=16",
        default="tp=16",
        group="plan",
    ),
    Input(
        "fixed", "settled", "keys that the search must keep: tp=8 zero=1", default="", group="plan"
    ),
)
BY_KEY = {item.key: item for item in INPUTS}


def default_of(key: str, model: str, chip: str) -> Value:
    """What an input is where nobody says otherwise.

    Args:
        key: of the input.
        model: the one that is chosen; its sizes are defaults.
        chip: the one that is chosen; its rates are defaults.
    """
    facts = {**model_facts(model), **chip_facts(chip)}
    return facts.get(key, BY_KEY[key].default)


def read_value(item: Input, text: str) -> Value:
    """Read what somebody typed: `3M`, `28672`, `2^14`, `1.5e15`, or one of the choices.

    Args:
        item: whose value it is.
        text: as it was typed.

    Raises:
        UsageError: it is no number, no choice, or out of range.
    """
    if item.kind == "choice":
        if text not in item.choices:
            raise UsageError(
                f"{item.key}={text[:40]!r} is not one of {', '.join(item.choices[:12])}"
            )
        return text
    if item.kind == "text":
        return " ".join(text.split())[:300]
    number = _number(item, text)
    if not item.low <= number <= item.high:
        raise UsageError(
            f"{item.key} is {text[:40]}; it can be {show_plain(item.low)} to {show_plain(item.high)}"
        )
    if item.whole and number != int(number):
        raise UsageError(f"{item.key} is {text[:40]}; it is a whole number")
    return int(number) if item.whole else number


def _number(item: Input, text: str) -> float:
    bare = text.strip().replace(",", "").replace(" ", "")
    base, power, exponent = bare.partition("^")
    try:
        if power:
            return math.pow(float(base), min(float(exponent), 64.0))
        return float(bare)
    except (ValueError, OverflowError):
        pass
    try:
        return parse_count(
            bare.removesuffix("/s").removesuffix("FLOP").removesuffix("B") or "?", item.key
        )
    except PhalanxError:
        raise UsageError(f"{item.key} is {text[:40]!r}; write it as 3M, 28672 or 2^14") from None


def show_plain(value: Value) -> str:
    """A value as a URL or a box has it: whole numbers in digits, others as short as they go."""
    if isinstance(value, str):
        return value
    return str(int(value)) if value == int(value) and abs(value) < 1e18 else repr(float(value))


def nudged(item: Input, value: Value, steps: int) -> Value:
    """The value some steps further, within the range.

    Args:
        item: whose scale it is.
        value: where it begins.
        steps: how many; negative for smaller values.
    """
    if isinstance(value, str):
        place = item.choices.index(value) if value in item.choices else 0
        return (
            item.choices[max(0, min(len(item.choices) - 1, place + steps))]
            if item.choices
            else value
        )
    steps = max(-FURTHEST, min(FURTHEST, steps))
    return _snapped(item, _moved(item, float(value), steps))


def _moved(item: Input, value: float, steps: int) -> float:
    if item.scale == "binary":
        return value * math.ldexp(1.0, steps)
    if item.scale == "linear":
        return (round(value / item.step) + steps) * item.step
    moved = value * 10.0 ** (steps / PER_DECADE)
    coarse = float(f"{moved:.{DIGITS - 1}e}")
    grain = (item.step if moved >= 4 * item.step else 1.0) if item.whole else 0.0
    snapped = round(coarse / grain) * grain if grain else coarse
    if snapped == value and steps:  # a small number moves at least by one grain
        snapped = value + math.copysign(grain or value * 10.0 ** (1 - DIGITS), steps)
    return snapped


def _snapped(item: Input, value: float) -> Value:
    held = max(item.low, min(item.high, value))
    return max(round(held), math.ceil(item.low)) if item.whole else round(held, 9)


def fraction_of(item: Input, value: Value) -> float:
    """Where a value stands in its range, 0 to 1, on the scale of the input.

    Args:
        item: whose range it is.
        value: a number.
    """
    if isinstance(value, str) or item.high <= item.low:
        return 0.0
    if item.scale == "linear":
        return (value - item.low) / (item.high - item.low)
    low = max(item.low, 1e-9)
    return math.log(max(value, low) / low) / math.log(item.high / low)
