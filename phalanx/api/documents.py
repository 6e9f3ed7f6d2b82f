"""The documents that `--json` prints and `to_dict()` gives, field by field.

Paths are written as `layouts[].step_seconds`; `{}` ends the path of an object whose keys are data,
such as `refused{}`. Sizes of a model, in `models`, are the keys of the table [model].
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields

from phalanx.core.errors import PhalanxError
from phalanx.core.model import ModelShape
from phalanx.core.quantities import QUANTITIES

_PRICE = (
    "layout step_seconds step_seconds_80 spread_reason mfu hfu convention tokens_per_second "
    "peak_bytes fits bubble term_seconds{} reasons"
)
_LINK = "name bytes_per_second sustained_bytes_per_second latency_seconds"
_DEVICE = (
    "name vendor memory_bytes memory_bytes_per_second peak_flops_per_second{} per_host "
    "device_names sources{} notes domain.size domain.topology domain.axes domain.reduces"
)
_CLUSTER = "name accelerator devices torus domain_size memory_bytes"
_CHECKPOINT = "step path bytes verified layout problem"
_ERRORS = "count mean median p90 worst bias"


_REPORT = (
    "name directory layout device run_state last_step steps counted_steps source step_seconds "
    "planned_step_seconds planned_step_seconds_80 terms[].name terms[].measured_seconds "
    "terms[].planned_seconds terms[].share terms[].planned_parts{} terms[].why mfu hfu planned_mfu "
    "flops_per_second_at_peak tokens_per_second peak_bytes planned_peak_bytes traffic[].axis "
    "traffic[].collective traffic[].purpose traffic[].bytes traffic[].planned_bytes "
    "traffic[].equal ranks[].rank ranks[].coordinates{} ranks[].compute_seconds "
    "ranks[].waiting_seconds ranks[].over_peers wall_seconds stopped_seconds wall_terms[].name "
    "wall_terms[].measured_seconds wall_terms[].share wall_terms[].why restarts skipped goodput "
    "losses validations[].step validations[].loss validations[].seconds events[].time "
    "events[].kind events[].step events[].rank events[].text kernels[].name kernels[].kind "
    "kernels[].times kernels[].seconds kernels[].share kernel_seconds{} notes"
)


def _under(prefix: str, names: str) -> str:
    return " ".join(f"{prefix}.{name}" for name in names.split())


_TRAINING = " ".join(
    [
        _under(
            "training",
            "tokens steps training_seconds goodput checkpoint_interval_seconds "
            "checkpoint_write_seconds failure_interval_seconds seconds device_hours cost",
        ),
        _under(
            "training.assumptions",
            "device_hours_per_failure restart_seconds storage_bytes_per_second "
            "price_per_device_hour",
        ),
    ]
)


def _links(prefix: str) -> str:
    return " ".join(_under(f"{prefix}.{link}", _LINK) for link in ("domain", "network", "host"))


_TEXTS: Mapping[str, str] = {
    "plan": " ".join(
        [
            "schema model cluster framework devices capacity_bytes seq batch tokens candidates",
            "feasible seconds searched refused{}",
            _under("layouts[]", f"rank {_PRICE} alike"),
            _under("plain", f"rank {_PRICE} difference_seconds{{}}"),
            _under("heuristic", f"rank refused {_PRICE} difference_seconds{{}}"),
            _under("why", f"request rank refused {_PRICE} difference_seconds{{}}"),
            _under("why.suggested", f"changes {_PRICE}"),
            _TRAINING,
            "notes",
        ]
    ),
    "estimate": " ".join(
        [
            "schema layout step_seconds step_seconds_80 spread_reason tokens_per_second mfu hfu",
            "convention bubble micro_batches",
            _under("terms", "name seconds worth reason children"),
            _under("memory", "peak_bytes capacity_bytes fits stage by_class{}"),
            _under("memory.stages[]", "stage peak_bytes moment in_flight by_class{}"),
            _under(
                "traffic[]",
                "axis collective purpose bytes bytes_per_rank times ranks seconds exposed_seconds",
            ),
            _TRAINING,
            "notes",
        ]
    ),
    "dryrun": " ".join(
        [
            "schema layout ranks passed",
            _under(
                "cases[]",
                "rank coordinates{} passed seconds peak_bytes planned_peak_bytes messages_equal "
                "differences",
            ),
            _under("cases[].messages[]", "axis collective purpose bytes times"),
        ]
    ),
    "calibrate": " ".join(
        [
            "schema name count vendor memory_gb hbm_gb_per_s per_host precision peak_tflops{}",
            "domain{} network{} host{} sustained{} measured{}",
            _under("collectives[]", "name ranks latency_us latency_us_80 gb_per_s gb_per_s_80"),
        ]
    ),
    "published": " ".join(
        [
            "schema",
            _under(
                "rows[]",
                "id predicted_step_seconds predicted_step_seconds_80 published_step_seconds "
                "time_error baseline_step_seconds baseline_error predicted_peak_bytes "
                "published_peak_bytes memory_error spread spread_reason fits layout complete "
                "assumptions skipped",
            ),
            _under("summary.groups{}.time", _ERRORS),
            _under("summary.groups{}.baseline", _ERRORS),
            _under("summary.groups{}.memory", _ERRORS),
            _under("summary.rankings[]", "source model devices count correlation"),
            _under("summary", "within_80 memory_under_by_3_percent skipped"),
        ]
    ),
    "schedule": (
        "schema name p m v rows makespan bubble_over_ideal idle_fraction peak_in_flight checked"
    ),
    "data tokenize": " ".join(
        [
            "schema format tokens num_documents text_bytes learned hash dtype vocab end tokenizer",
            "fingerprint prompts_masked source",
            _under("shards[]", "name tokens num_documents text_bytes learned largest hash"),
        ]
    ),
    "data show": (
        "schema path name token_dtype tokens num_documents separator bytes_per_token learned vocab "
        "tokenizer hash first_ids first_text damaged"
    ),
    "generate": " ".join(["schema", _under("texts[]", "prompt text ids ended")]),
    "eval": ("schema model corpus nats tokens bytes_per_token perplexity bits_per_byte"),
    "verify": " ".join(
        [
            "schema passed seed",
            _under(
                "cases[]",
                "layout passed max_rel_error{} seconds ranks steps masked documents set complaints "
                "command",
            ),
        ]
    ),
    "drill": " ".join(
        [
            "schema passed seed unmet",
            _under(
                "cases[]",
                "fault where rank noticed_seconds back_seconds steps_repeated equal differences",
            ),
        ]
    ),
    "train": (
        "schema name directory layout parameters first_step last_step steps interrupted first_loss "
        "last_loss validation_loss bytes_per_token tokens seconds tokens_per_second "
        "flops_per_second mfu hfu convention averaged_steps validations time_split{} stragglers "
        "goodput lost_seconds{} restart_seconds checkpoint_write_seconds "
        "peak_bytes checkpoints sample proof "
        "next_steps first_bits_per_byte last_bits_per_byte validation_bits_per_byte"
    ),
    "train, metrics.jsonl": (
        "step time loss grad_norm lr tokens seconds tokens_per_second flops_per_second mfu hfu "
        "data_wait_seconds exposed_seconds{} peak_bytes skipped loss_scale expert_load goodput "
        "expert_dropped validation_loss validation_seconds"
    ),
    "report": f"schema {_REPORT}",
    "report RUN RUN2": " ".join(
        [
            "schema difference_seconds",
            _under("first", f"schema {_REPORT}"),
            _under("second", f"schema {_REPORT}"),
            _under(
                "terms[]",
                "name measured_seconds first_seconds difference_seconds planned_difference_seconds",
            ),
            _under("keys[]", "key first second"),
        ]
    ),
    "doctor": " ".join(
        [
            "schema name notes",
            _under("findings[]", "cause seen evidence change expected_gain"),
        ]
    ),
    "checkpoints": " ".join(
        ["schema directory", _under("checkpoints[]", _CHECKPOINT), "set_aside"]
    ),
    "checkpoints --show": " ".join(
        [
            "schema samples state{}",
            _under("checkpoints[]", _CHECKPOINT),
            _under("tensors[]", "name field dtype shape files"),
        ]
    ),
    "checkpoints --diff": " ".join(
        [
            "schema equal compared state{}",
            _under("checkpoints[]", _CHECKPOINT),
            _under("tensors[]", "name field difference changed elements max_difference"),
        ]
    ),
    "train --dry-run": (
        "schema layout ranks stages micro_batches parameters tokens_per_step steps tokens corpus "
        "corpus_tokens needed_bytes free_bytes notes resumes"
    ),
    "completion": "schema shell script",
    "launch": "schema kind nodes ranks path job script",
    "models": " ".join(
        [
            "schema seq",
            _under("models[]", " ".join(field.name for field in fields(ModelShape))),
            _under(
                "models[]",
                "aliases parameters active_parameters published_parameters "
                "published_active_parameters flops_per_token convention source verified notes",
            ),
            _under("limits", "cluster tensor_limit domain_tokens_floor network_tokens_floor"),
        ]
    ),
    "clusters": " ".join(
        [
            "schema",
            _under("accelerators[]", _DEVICE),
            _links("accelerators[]"),
            _under("clusters[]", _CLUSTER),
        ]
    ),
    "clusters NAME": " ".join(
        [
            "schema",
            _under("accelerator", _DEVICE),
            _links("accelerator"),
            _under("cluster", _CLUSTER),
        ]
    ),
    "explore": "schema state inputs{} unknown{} problems records{}",
    "help": "schema topics[].name topics[].kind topics[].meaning topics[].default topics[].values "
    "topics[].example",
}
DOCUMENTS: Mapping[str, tuple[str, ...]] = {
    command: tuple(dict.fromkeys(text.split())) for command, text in _TEXTS.items()
}


def legend_of(command: str) -> Iterator[tuple[str, str, str]]:
    """Each field of a document with its unit and meaning; the sizes of a model in one row.

    Raises:
        PhalanxError: a field that the legend does not have.
    """
    known = {quantity.name: quantity for quantity in QUANTITIES}
    sizes = {field.name for field in fields(ModelShape)} - {"name"}
    for path in DOCUMENTS[command]:
        name = path.rpartition(".")[2].removesuffix("{}").removesuffix("[]")
        if path.startswith("models[].") and name in sizes:
            continue
        if name not in known:
            raise PhalanxError(f"{command} prints {path}, which phalanx/core/quantities.py lacks")
        yield path, known[name].unit, known[name].meaning
    if command == "models":
        yield "models[].*", "", "every key of the table [model], see keys.md"
