"""A process knows whether it is one rank of several, whoever started it; half a set is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import UsageError
from phalanx.trainer.run.started import first_node, node_of, started_by

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "1234",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_NODEID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),4",
}


def test_nobody_started_this() -> None:
    assert started_by({}) is None


def test_the_set_of_torchrun_is_read() -> None:
    assert started_by(TORCHRUN) == ("torchrun", 3, 4, 1, 2, "node1", 1234)


@pytest.mark.parametrize(
    "stray",
    [
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "", "WORLD_SIZE": ""},
        {"RANK": "0"},
        {"WORLD_SIZE": "8"},
        {"RANK": "zero", "WORLD_SIZE": "2"},
        {"MASTER_ADDR": "node1", "MASTER_PORT": "1234"},
    ],
)
def test_a_stray_variable_is_no_launcher(stray: dict[str, str]) -> None:
    assert started_by(stray) is None


@pytest.mark.parametrize("missing", sorted(TORCHRUN.keys() - {"RANK", "WORLD_SIZE"}))
def test_half_a_set_of_several_ranks_is_refused(missing: str) -> None:
    with pytest.raises(UsageError, match=f"WORLD_SIZE=4 are set, but {missing} is not"):
        started_by({**TORCHRUN, missing: ""})


def test_a_task_of_srun_finds_its_place_and_the_first_machine() -> None:
    found = started_by(SRUN)
    assert found is not None
    assert found[:6] == ("srun", 5, 8, 1, 4, "gpu07")
    others = [started_by({**SRUN, "SLURM_PROCID": str(rank)}) for rank in range(8)]
    assert {other.port for other in others if other} == {found.port}


def test_tasks_on_one_machine_meet_on_it() -> None:
    few = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}
    found = started_by({**few, "SLURM_NODELIST": "big"})
    assert found is not None
    assert found[:6] == ("srun", 1, 2, 1, 2, "127.0.0.1")
    with pytest.raises(UsageError, match="SLURM_JOB_NODELIST is not set"):
        started_by(few)


@pytest.mark.parametrize(
    "one_process",
    [
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},  # an interactive step of a job with more tasks
        {**{k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"}, "ENVIRONMENT": "BATCH"},
        {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"},  # a shell of salloc
    ],
)
def test_a_batch_script_and_a_shell_of_slurm_are_one_process(one_process: dict[str, str]) -> None:
    assert started_by(one_process) is None


def test_mpirun_on_one_machine_is_read_and_on_several_asks_for_an_address() -> None:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    one = {f"OMPI_COMM_WORLD_{n}": v for n, v in zip(names, "1212", strict=True)}
    found = started_by(one)
    assert found is not None
    assert found[:6] == ("mpirun", 1, 2, 1, 2, "127.0.0.1")
    several = {**one, "OMPI_COMM_WORLD_SIZE": "4"}
    with pytest.raises(UsageError, match="set MASTER_ADDR"):
        started_by(several)
    assert started_by({**several, "MASTER_ADDR": "node1"}) is not None


@given(st.from_regex(r"[a-z]{1,8}[0-9]{0,4}", fullmatch=True))
def test_a_single_machine_is_its_own_list(name: str) -> None:
    assert first_node(name) == first_node(f"{name},other[1-3]") == name


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n[03-04,7],big", "n03"),
        ("n[7,9]-ib", "n7-ib"),
        ("a,b", "a"),
        ("rack1-n[001-128]", "rack1-n001"),
    ],
)
def test_the_first_machine_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_torch_is_told_in_its_own_words() -> None:
    found = started_by(SRUN)
    assert found is not None
    environ: dict[str, str] = {}
    found.tell_torch(environ)
    assert started_by(environ) == found._replace(launcher="torchrun")


def test_slurm_says_which_machine_this_is_and_where_they_meet() -> None:
    environ = {"SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "gpu[07-08]", "MASTER_PORT": "29500"}
    assert node_of(2, None, "", environ) == (1, 2, "gpu07", 29500)
    assert node_of(2, None, "", environ | {"MASTER_ADDR": "10.0.0.7"}).address == "10.0.0.7"


def test_kubernetes_says_which_machine_this_is() -> None:
    assert node_of(3, None, "run-0:29400", {"JOB_COMPLETION_INDEX": "2"}).number == 2


@pytest.mark.parametrize(
    ("number", "rendezvous", "environ", "told"),
    [
        (None, "a:1", {}, "--node-rank"),
        (2, "a:1", {}, "it is 0 to 1"),
        (0, "a", {}, "HOST:PORT"),
        (0, "a:70000", {}, "HOST:PORT"),
        (0, "", {}, "--rendezvous"),
    ],
)
def test_a_machine_that_cannot_know_its_place_is_refused(
    number: int | None, rendezvous: str, environ: dict[str, str], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        node_of(2, number, rendezvous, environ)
