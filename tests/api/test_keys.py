"""Every key of a layout and a run file is explained, from the one place where it is declared."""

import shlex
from dataclasses import fields

import pytest

from phalanx.api.keys import Topic, attribute_texts, find, topic, topics
from phalanx.api.runfile import assignment
from phalanx.core.errors import UsageError
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Data, Recipe, Run
from phalanx.core.track import Track
from phalanx.schedules.registry import NAMES

KEYS = [known for known in topics() if known.kind.endswith("key")]
TABLES = {"layout": Layout, "model": ModelShape, "recipe": Recipe, "data": Data, "track": Track}
TOGETHER = {  # keys that mean nothing alone, with what they need
    "experts": {"top_k": 2},
    "norm_all_heads": {"qk_norm": True},
    **{name: {"experts": 8, "top_k": 2} for name in ("top_k", "shared_experts", "moe_ffn")},
    **{name: {"qk_nope": 8, "qk_rope": 4, "v_head": 8} for name in ("q_lora_rank", "kv_lora_rank")},
}


@pytest.mark.parametrize("table", TABLES)
def test_every_field_is_a_key_with_a_meaning(table: str):
    known = {key.name: key for key in KEYS}
    for field in fields(TABLES[table]):
        assert len(known[f"{table}.{field.name}"].meaning) > 5


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_an_example_is_one_that_the_program_takes(key: Topic):
    command, option, value = shlex.split(key.example)[1:]
    assert command == "train"
    if option == "--layout":
        Layout.parse(value if key.name != "layout.shard" else f"{value} dp=16")
        return
    section, name, given = assignment(value)
    if f"{section}.{name}" == "model.name":
        return
    if section == "cluster":
        Run.from_tables({section: {name: given}})
        return
    Run.from_tables({section: {**TOGETHER.get(name, {}), name: given}})


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_a_default_is_the_one_of_the_class(key: Topic):
    table, _, name = key.name.partition(".")
    if table == "layout" or name in ("weights",) or table == "cluster":
        return
    value = getattr(
        {"model": ModelShape, "recipe": Recipe, "data": Data, "track": Track}[table], name
    )
    expected = {True: "true", False: "false"}.get(value) if isinstance(value, bool) else str(value)
    assert key.default.strip('"') == expected


def test_schedules_and_models_are_named_by_their_registries():
    assert topic("layout.schedule").values.startswith(", ".join(NAMES))
    assert "llama-3.1-405b" in topic("model.name").values
    assert "h100" in topic("cluster.name").values


def test_a_key_is_found_without_its_table_and_a_table_by_its_name():
    assert [found.name for found in find("kv_heads")] == ["model.kv_heads"]
    assert {found.name for found in find("zero")} == {"layout.zero", "ZeRO"}
    assert {found.name for found in find("data")} >= {"data.path", "data.separator"}


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("zb-v", "layout.schedule"),
        ("ring", "layout.context"),
        ("swiglu", "model.activation"),
        ("fsdp", "layout.zero"),
    ],
)
def test_a_value_leads_to_its_key(value, key):
    assert key in {found.name for found in find(value)}


def test_an_unknown_key_is_answered_with_the_nearest():
    with pytest.raises(UsageError, match=r"did you mean recipe\.clip"):
        find("recipe.clp")
    with pytest.raises(UsageError, match=r"did you mean model\.kv_heads"):
        find("kvheads")
    with pytest.raises(UsageError, match="phalanx help lists all"):
        find("xyzzyxyzzy")


def test_names_that_share_a_line_share_its_text():
    class Pair:
        """Two things.

        Attributes:
            one, two: of a kind
                that takes two lines.
        """

    text = "of a kind that takes two lines"
    assert attribute_texts(Pair) == {"one": text, "two": text}


def test_what_other_programs_call_a_key_leads_to_ours():
    assert [found.name for found in find("max_grad_norm")] == ["recipe.clip"]
