"""The oracle is tested too: whatever is broken on purpose, it notices."""

import pytest

from phalanx.core.message import Message
from phalanx.cost.messages import rank_messages
from phalanx.oracle import mutations
from phalanx.oracle.cases import CaseSpec, covering_set
from phalanx.oracle.mutations import mutations_of
from phalanx.oracle.pool import RankPool
from phalanx.oracle.verify import Tamper, compare, reference_job

SMALL = {"model": {"layers": 2}, "recipe": {"seq": 16}}
BALANCED = {**SMALL, "recipe": {"seq": 16, "balance_speed": 0.01}}

MESSAGES = [
    CaseSpec("tp=2 mb=4 logits=40 recompute=mlp", ("gpt", "mqa"), tables=SMALL),
    CaseSpec("tp=2 sp=off mb=4", ("odd", "smoothing", "qk-norm"), tables=SMALL),
    CaseSpec("tp=2 sp=off mb=4", ("direct-query",), tables=SMALL),
    CaseSpec("dp=2 zero=0 mb=2", ("sgd",), tables=SMALL),
    CaseSpec("dp=2 zero=1 mb=4", tables=SMALL),
    CaseSpec("dp=4 shard=2 zero=2", ("max-norm",), tables=SMALL),
    CaseSpec("dp=2 zero=3 mb=2", ("tied",), tables=SMALL),
    CaseSpec("dp=2 ep=2 mb=4", ("experts",), tables=BALANCED),
    CaseSpec("cp=2 ep=2 mb=8", ("experts",), tables=BALANCED),
    CaseSpec("pp=2 mb=2", ("tied",), tables=SMALL),
    CaseSpec("pp=2 schedule=interleaved v=2 mb=4", ("no-clip",)),
    CaseSpec("cp=2 zero=0 mb=4", tables=SMALL),
    CaseSpec("cp=2 zero=0 mb=4 context=gather", tables=SMALL),
    CaseSpec("cp=2 zero=0 mb=4 context=ulysses", tables=SMALL),
    CaseSpec("pp=2 schedule=dualpipe mb=2", ("tied", "experts"), tables=BALANCED),
]

# Of these only the messages that belong to scales are broken; the others are above.
SCALES = [
    CaseSpec("dp=2 mb=4 precision=fp8+fp64", tables=SMALL),
    CaseSpec("tp=2 mb=8 precision=fp8+fp64", tables=SMALL),
    CaseSpec("tp=2 mb=8 precision=fp8-current+fp64", tables=SMALL),
    CaseSpec("tp=2 mb=8 precision=fp8-block+fp64", ("wide",), tables=SMALL),
]

STEPS = [
    (mutations.divides_by_micro_batches, CaseSpec("dp=1 mb=4")),
    (mutations.keeps_the_last_micro_batch, CaseSpec("dp=2 zero=1 mb=2")),
    (mutations.keeps_the_last_micro_batch, CaseSpec("pp=2 mb=4")),
    (mutations.forgets_weights_once, CaseSpec("pp=2 schedule=zb-h1 mb=2")),
    (mutations.forgets_documents, CaseSpec("pp=2 mb=4", documents=True)),
    (mutations.forgets_documents, CaseSpec("cp=2 mb=4", documents=True)),
    (mutations.swaps_chunks, CaseSpec("cp=2 mb=4")),
    (mutations.swaps_chunks, CaseSpec("cp=2 mb=4 context=ulysses")),
    (mutations.skips_a_block, CaseSpec("pp=2 mb=4")),
    (mutations.decays_vectors, CaseSpec("dp=1 mb=8")),
    (mutations.counts_copies, CaseSpec("pp=2 mb=4", ("tied",))),
    (mutations.counts_copies, CaseSpec("pp=2 schedule=dualpipe mb=2", ("sgd",))),
    (mutations.starts_one_step_late, CaseSpec("dp=1 mb=8", ("sgd",))),
    (mutations.starts_elsewhere, CaseSpec("dp=2 zero=0 mb=4")),
    (mutations.starts_elsewhere, CaseSpec("tp=2 mb=8")),
    (mutations.drops_by_rank, CaseSpec("tp=2 sp=off mb=8", ("dropout",))),
]


def name(value: object) -> str:
    """The id of a parameter."""
    if isinstance(value, CaseSpec):
        return f"{value.layout} {value.unusual}".strip()
    return getattr(value, "__name__", str(value))


def planned(spec: CaseSpec) -> set[tuple[str, str]]:
    """The collectives and purposes of all messages that its ranks send."""
    run = spec.case().run
    places = [run.layout.coordinates(rank) for rank in range(run.layout.ranks)]
    return {(t.collective, t.purpose) for at in places for t in rank_messages(run, at)}


def flat(traffic: list[list[Message]]) -> list[Message]:
    return [transfer for rank in traffic for transfer in rank]


@pytest.mark.ranks
@pytest.mark.parametrize("spec", MESSAGES, ids=name)
def test_no_broken_message_escapes_the_oracle(ranks: RankPool, spec: CaseSpec) -> None:
    case = spec.case(steps=1)
    (reference,) = ranks.run(1, reference_job, case)
    honest = compare(ranks, case, reference)
    assert honest.passed, honest.complaints
    broken = mutations_of(flat(honest.traffic))
    assert broken
    escaped = [str(m) for m in broken if compare(ranks, case, reference, m).passed]
    assert escaped == []


@pytest.mark.ranks
@pytest.mark.parametrize("spec", SCALES, ids=name)
def test_no_broken_scale_escapes_the_oracle(ranks: RankPool, spec: CaseSpec) -> None:
    case = spec.case(steps=2)  # the first may only calibrate
    (reference,) = ranks.run(1, reference_job, case)
    honest = compare(ranks, case, reference)
    assert honest.passed, honest.complaints
    every = mutations_of(flat(honest.traffic))
    broken = [m for m in every if m.purpose == "amax" or m.purpose.endswith("scales")]
    assert broken
    escaped = [str(m) for m in broken if compare(ranks, case, reference, m).passed]
    assert escaped == []


def test_every_message_of_the_covering_set_is_broken_somewhere() -> None:
    sent = set().union(*(planned(spec) for spec in covering_set()))
    assert sent <= set().union(*(planned(spec) for spec in (*MESSAGES, *SCALES)))


@pytest.mark.ranks
@pytest.mark.parametrize(("tamper", "spec"), STEPS, ids=name)
def test_no_broken_step_escapes_the_oracle(ranks: RankPool, tamper: Tamper, spec: CaseSpec) -> None:
    case = spec.case(steps=1)
    (reference,) = ranks.run(1, reference_job, case)
    assert compare(ranks, case, reference).passed
    assert not compare(ranks, case, reference, tamper=tamper).passed
