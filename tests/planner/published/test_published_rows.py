from pathlib import Path

import pytest

from phalanx.core.errors import UsageError
from phalanx.cost.flops import flops_per_token
from phalanx.planner.published.cells import UnusableError
from phalanx.planner.published.rows import read_rows, read_run
from phalanx.schedules.layouts import chunks

HERE = Path(__file__).parents[3] / "benchmarks" / "published"
ROWS = {
    row["id"]: row
    for name in ("runs_fit.csv", "runs_validate.csv")
    for row in read_rows(HERE / name)
}
COMPLETE_ROW = ROWS["LF-h100_80gb-7b-s2048-n8-39"]


def changed(row, **columns):
    return {**row, **columns}


def test_tokens_per_second_need_no_convention():
    run = read_run(COMPLETE_ROW)
    rate = float(COMPLETE_ROW["tokens_per_s_per_gpu"])
    assert run.step_seconds == pytest.approx(run.seq * run.batch / (8 * rate))


@pytest.mark.parametrize(
    ("name", "days"),
    [
        ("N21-T2-ZeRO-3-174.6B-384", 90),
        ("N21-T2-PTD-P-174.6B-384", 84),
        ("N21-T2-PTD-P-529.6B-560", 156),
    ],
)
def test_flops_that_count_recomputation_give_the_days_that_the_paper_gives(name, days):
    """Narayanan et al. 2021 (arXiv:2104.04473), table 2: days for 300B tokens."""
    run = read_run(ROWS[name])
    steps = 300e9 / (run.seq * run.batch)
    assert run.step_seconds * steps / 86400 == pytest.approx(days, rel=0.02)


def test_flops_beside_an_mfu_count_the_model_only_and_full_attention():
    row = ROWS["MLM-README-32B"]
    run = read_run(row)
    flops = flops_per_token(run.shape, run.seq, causal=False) * run.seq * run.batch
    assert run.step_seconds == pytest.approx(flops / (459.6e12 * 384))


def test_fp8_programs_count_the_causal_half():
    run = read_run(ROWS["MBS-l3-70b-sft-base"])
    flops = flops_per_token(run.shape, run.seq, causal=True) * run.seq * run.batch
    assert run.step_seconds == pytest.approx(flops / (704e12 * 32))


@pytest.mark.parametrize(
    ("name", "activation", "tied", "billions"),
    [
        ("VT-multi-0", "gelu", True, 3.6),
        ("NT-3.57B-8n", "swiglu", True, 3.57),
        ("NT-8.86B-8n", "swiglu", False, 8.86),
        ("MLM-README-1.7B", "gelu", False, 1.7),
        ("TT-T1-1", "swiglu", False, 8.03),
        ("ZB-14.6B-1F1B-m48", "gelu", True, 14.6),
    ],
)
def test_the_block_and_the_tying_that_give_the_parameters_are_taken(
    name, activation, tied, billions
):
    shape = read_run(ROWS[name]).shape
    assert (shape.activation, shape.tied) == (activation, tied)
    assert shape.params() == pytest.approx(billions * 1e9, rel=0.04)


def test_what_a_row_cannot_say_of_a_model_comes_from_the_catalog():
    shape = read_run(ROWS["MBS-moonlight16b-none"]).shape
    assert shape.is_mla
    assert shape.is_moe
    assert shape.layers == 27


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("ZB-1.5B-ZB-2p-m24", "schedule=zb-h2"),
        ("ZB-1.5B-ZB-1p-m24", "schedule=zb-h1"),
        ("K22-T5-175B-selSP", "v=3 schedule=interleaved recompute=selective"),
        ("TT-T1-1", "zero=3 mb=2 recompute=operators"),
        ("MBS-l3-70b-sft-rc-mlp_attn", "recompute=core+mlp precision=fp8"),
        ("VT-multi-0", "zero=0 mb=8 recompute=full precision=fp16"),
    ],
)
def test_the_columns_become_a_layout(name, layout):
    (found,) = read_run(ROWS[name]).layouts
    assert set(layout.split()) <= set(str(found).split())


def test_one_layer_per_chunk_leaves_embedding_and_head_alone():
    (layout,) = read_run(ROWS["ZB-1.5B-1F1B-I-m24"]).layouts
    assert (chunks(layout), layout.stages) == (3, (0, *(1,) * 22, 0))


def test_a_missing_micro_batch_is_swept_and_the_row_says_so():
    run = read_run(ROWS["N21-T1-3.6B"])
    assert [layout.mb for layout in run.layouts] == [1, 2, 4, 8]
    assert "best micro-batch of 1, 2, 4, 8" in run.assumptions


def test_the_network_that_a_row_states_is_the_one_that_counts():
    stated = read_run(ROWS["VT-multi-0"]).cluster.accelerator.network.bandwidth
    assert stated == 800e9 / 8 / 8
    silent = read_run(ROWS["K22-T5-175B-full"]).cluster.accelerator.network.bandwidth
    assert silent == 25e9


def test_memory_chooses_among_parts_of_one_name():
    assert read_run(ROWS["LF-a100_40gb-7b-s512-n8-161"]).cluster.accelerator.memory == 40e9
    assert read_run(ROWS["TT-T1-1"]).cluster.accelerator.name == "h100-sxm-96gb"


def test_programs_are_told_apart_by_precision_and_sharding():
    names = [
        read_run(ROWS[name]).framework.name for name in ("VT-multi-0", "TT-T1-1", "NT-1.34B-8n")
    ]
    assert names == ["Megatron-LM 2021", "PyTorch FSDP2", "eager 3D"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"layers": "", "hidden": "", "model": "nobody"}, "no layers or hidden size"),
        ({"gpu": "abacus"}, "the catalog has no accelerator 'abacus'"),
        ({"n_gpus": ""}, "no n_gpus"),
        ({"global_batch_seqs": "", "tokens_per_batch": "", "step_time_s": "1"}, "no batch"),
    ],
)
def test_a_row_that_says_too_little_says_what_is_missing(columns, message):
    with pytest.raises(UnusableError, match=message):
        read_run(changed(COMPLETE_ROW, **columns))


def test_a_schedule_that_nobody_knows_is_taken_as_the_one_it_begins_with_or_1f1b():
    row = changed(ROWS["VT-multi-74"], vpp="2")
    for name, found in (("interleaved 1F1B (flexible n)", "interleaved"), ("waltz", "interleaved")):
        run = read_run(changed(row, schedule=name))
        assert run.layouts[0].schedule == found  # the row has two chunks
    run = read_run(changed(row, schedule="waltz", vpp=""))
    assert run.layouts[0].schedule == "1f1b"
    assert "schedule 'waltz' taken as 1f1b" in run.assumptions


def test_interleaved_in_one_chunk_is_1f1b_and_an_open_number_of_chunks_is_said():
    row = changed(ROWS["VT-multi-74"], schedule="interleaved 1F1B")
    run = read_run(changed(row, vpp="1"))
    assert run.layouts[0].schedule == "1f1b"
    assert any("one chunk" in words for words in run.assumptions)
    run = read_run(changed(row, vpp=""))
    assert run.layouts[0].schedule == "interleaved"
    assert any(words.startswith("interleaved in") for words in run.assumptions)


def test_a_row_without_a_batch_that_gives_a_rate_is_read():
    run = read_run(changed(COMPLETE_ROW, global_batch_seqs="", tokens_per_batch=""))
    assert any("sequences per step" in words for words in run.assumptions)
    rate = float(COMPLETE_ROW["tokens_per_s_per_gpu"])
    assert run.step_seconds == pytest.approx(run.seq * run.batch / (8 * rate))


RECIPE = next(row for row in ROWS.values() if row["recipe_match"] == "exact" and row["experts"])


def test_cells_of_a_recipe_count_only_where_it_is_what_ran():
    row = changed(RECIPE, cuda_graphs="attn+moe_router", ep_overlap="yes", grad_dtype="bf16")
    ours = read_run(row).framework
    assert ours.captured == {"attention", "router"}
    assert (ours.hides_experts, ours.gradient) == (True, 2)
    other = read_run(changed(row, recipe_match="differs: mbs 4 in recipe")).framework
    assert not other.captured
    assert (other.hides_experts, other.gradient) == (False, 4)


@pytest.mark.parametrize(
    ("columns", "field", "value"),
    [
        ({"cuda_graphs": "full_iteration"}, "graphs", True),
        ({"moe_dispatcher": "alltoall"}, "sends_token_once", False),
        ({"moe_dispatcher": "hybridep"}, "sends_token_once", True),
        ({"param_gather_overlap": "no"}, "hides_weights", False),
        ({"tp_overlap": "yes, userbuffers (layer cfg)"}, "hides_sums", True),
        ({"notes": "release 26.06; LoRA Performance"}, "learns", False),
    ],
)
def test_columns_change_the_profile_of_a_program(columns, field, value):
    assert getattr(read_run(changed(RECIPE, **columns)).framework, field) == value


def test_layers_of_stages_are_read_where_the_row_draws_them():
    row = next(row for row in ROWS.values() if row["pp_layout"].startswith("Et*4|(t*4|)*14tmL"))
    run = read_run(row)
    assert run.layouts[0].stages == (*(4,) * 15, 2)
    assert run.shape.layers == 62  # with the one that predicts a further token


@pytest.mark.parametrize(
    ("recipe", "precision"), [("current", "fp8-current"), ("blockwise", "fp8-block"), ("", "fp8")]
)
def test_the_column_says_how_fp8_is_scaled(recipe, precision):
    (layout,) = read_run(changed(COMPLETE_ROW, dtype="fp8", fp8_recipe=recipe)).layouts
    assert str(layout.precision) == precision


def test_a_file_of_something_else_is_wrong_usage(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"other.csv has no column 'id'"):
        read_rows(path)


def test_a_dp_that_does_not_give_the_devices_is_mended():
    row = ROWS["VT-multi-0"]
    (layout,) = read_run(changed(row, dp="4")).layouts
    assert layout.dp == 64
    assert any("dp=64" in words for words in read_run(changed(row, dp="4")).assumptions)


def test_a_batch_that_nearly_divides_is_rounded_and_one_that_does_not_is_left():
    row = ROWS["VT-multi-0"]  # dp=64 mb=8
    near = read_run(changed(row, global_batch_seqs="500"))
    assert near.batch == 512
    assert "512 sequences instead of 500, which do not divide" in near.assumptions
    assert read_run(changed(row, global_batch_seqs="700")).batch == 700


@pytest.mark.parametrize(
    ("words", "precision"),
    [("bf16-mixed", "bf16"), ("MXFP8", "mxfp8"), ("", "bf16"), ("?", "bf16")],
)
def test_a_number_format_is_found_in_many_words(words, precision):
    (layout,) = read_run(changed(COMPLETE_ROW, dtype=words)).layouts
    assert str(layout.precision) == precision


def test_a_pipeline_that_would_idle_for_most_of_the_time_is_taken_as_interleaved():
    row = changed(ROWS["VT-multi-74"], schedule="", global_batch_seqs="128", micro_batch="2")
    (layout,) = read_run(row).layouts
    assert (layout.schedule, chunks(layout)) == ("interleaved", 3)
    (layout,) = read_run(changed(row, global_batch_seqs="1536")).layouts
    assert layout.schedule == "1f1b"


@pytest.mark.parametrize("cell", ["x", "-1", "2.5", "0"])
def test_a_degree_that_cannot_be_read_is_not_taken_for_1(cell):
    row = {**ROWS["VT-multi-0"], "tp": cell}
    with pytest.raises(UnusableError, match=f"tp is '{cell}'"):
        read_run(row)


def test_a_file_that_is_no_text_is_wrong_usage(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_bytes(bytes(range(256)))
    with pytest.raises(UsageError, match="no CSV file"):
        read_rows(path)
