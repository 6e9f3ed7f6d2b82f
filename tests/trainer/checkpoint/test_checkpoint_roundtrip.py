"""Save under one layout, read under another."""

import json
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from checkpoint_ranks import (
    Cut,
    cuts,
    make_savers,
    piece,
    same_bits,
    save_all,
    split_evenly,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from phalanx.core.errors import CheckpointError
from phalanx.trainer.checkpoint import Checkpoint, Piece, Saver, newest
from phalanx.trainer.checkpoint.disk import Disk

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NAME = "blocks.0.attention.q.weight"


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit pattern there is, so also infinities and every kind of NaN."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape)


def blank(filled: Piece) -> Piece:
    """The same piece, to be read."""
    place = (filled.name, filled.field, filled.shape, filled.offsets, filled.sizes)
    return Piece(*place, filled.start, filled.stop, torch.zeros_like(filled.data))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_layout_reads_the_bits_that_any_other_has_saved(data):
    world = data.draw(st.integers(1, 3))
    tensors, ranks = {}, [[] for _ in range(world)]
    for k in range(data.draw(st.integers(1, 3))):
        shape = data.draw(st.lists(st.integers(1, 7), max_size=4).map(tuple))
        key = (f"layer.{k}", data.draw(st.sampled_from(["weight", "exp_avg"])))
        tensors[key] = random_bits(shape, data.draw(st.sampled_from(DTYPES)), seed=k)
        for cut in data.draw(cuts(shape)):
            ranks[data.draw(st.integers(0, world - 1))].append(piece(*key, tensors[key], cut))
    with TemporaryDirectory() as root:
        save_all(make_savers(Path(root), world), 7, ranks)
        found = newest(Path(root), pytest.fail)
        assert found is not None
        with found, Checkpoint.open(found.path) as elsewhere:
            for (name, field), whole in tensors.items():
                assert same_bits(found.tensor(name, field), whole)
                for cut in data.draw(cuts(tuple(whole.shape))):
                    saved = piece(name, field, whole, cut)
                    read = blank(saved)
                    elsewhere.read([read])
                    assert same_bits(read.data, saved.data)


def test_names_fields_step_and_state_come_back(tmp_path):
    tensors = {
        ("b", "weight"): torch.ones(3),
        ("b", "exp_avg"): torch.ones(3),
        ("a", "weight"): torch.ones(2, 2),
    }
    state = {"step": 5, "layout": "dp=2", "data": {"position": [1, 2.5, None]}, "done": False}
    saver = Saver(tmp_path, 0, 1, attempt="a")
    saver.save(5, split_evenly(tensors, 1)[0], state)
    saver.wait()
    with Checkpoint.open(tmp_path / "step-00000005") as found:
        assert found.names() == ["a", "b"]
        assert found.fields("b") == ["exp_avg", "weight"]
        assert found.fields("c") == []
        assert (found.step, found.state) == (5, state)


def test_files_are_plain_safetensors_with_telling_keys(tmp_path):
    whole = torch.arange(6.0).reshape(2, 3)
    save_all(make_savers(tmp_path, 2), 1, split_evenly({(NAME, "weight"): whole}, 2))
    path = tmp_path / "step-00000001"
    files = sorted(p.name for p in path.iterdir())
    assert files == ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]
    assert load_file(path / "rank-00001.safetensors")[f"weight/{NAME}#0"].tolist() == [3, 4, 5]
    manifest = json.loads((path / "manifest.json").read_text())
    assert (
        manifest["files"]["rank-00001.safetensors"]["bytes"]
        == (path / "rank-00001.safetensors").stat().st_size
    )


def test_a_rank_that_owns_nothing_saves_an_empty_file(tmp_path):
    whole = torch.arange(3.0)
    ranks = [split_evenly({("w", "weight"): whole}, 1)[0], []]
    save_all(make_savers(tmp_path, 2), 1, ranks)
    with Checkpoint.open(tmp_path / "step-00000001") as found:
        assert same_bits(found.tensor("w"), whole)


def test_widths_of_elements_mix_in_one_file(tmp_path):
    tensors = {("w", str(dtype)): random_bits((3, 5), dtype, seed=1) for dtype in DTYPES}
    tensors["w", "flags"] = torch.arange(3, dtype=torch.uint8)
    save_all(make_savers(tmp_path, 2), 1, split_evenly(tensors, 2))
    with Checkpoint.open(tmp_path / "step-00000001") as found:
        for (name, field), whole in tensors.items():
            assert same_bits(found.tensor(name, field), whole)


class GatedDisk(Disk):
    """Writes nothing until the gate opens."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def create(self, path):
        assert self.gate.wait(30)
        return super().create(path)


def test_tensors_may_change_as_soon_as_save_returns(tmp_path):
    disk = GatedDisk()
    whole = torch.arange(1000.0)
    saved, state = whole.clone(), {"position": [1]}
    saver = Saver(tmp_path, 0, 1, attempt="a", disk=disk)
    saver.save(1, [Piece("w", "weight", (1000,), (0,), (1000,), 0, 1000, whole)], state)
    whole.zero_()
    state["position"].append(2)
    disk.gate.set()
    saver.wait()
    with Checkpoint.open(tmp_path / "step-00000001") as found:
        assert same_bits(found.tensor("w"), saved)
        assert found.state == {"position": [1]}


def test_a_second_save_waits_for_the_first(tmp_path):
    disk = GatedDisk()
    saver = Saver(tmp_path, 0, 1, attempt="a", disk=disk)
    for step in (1, 2):
        if step == 2:
            threading.Timer(0.1, disk.gate.set).start()
        saver.save(step, split_evenly({("w", "weight"): torch.full((4,), step)}, 1)[0], {})
        assert (tmp_path / "step-00000001").exists() == (step == 2)
    saver.wait()
    for step in (1, 2):
        with Checkpoint.open(tmp_path / f"step-0000000{step}") as found:
            assert found.tensor("w").tolist() == [step] * 4


@pytest.fixture
def small(tmp_path):
    tensors = {("blocks.0.weight", "weight"): torch.ones(6, 4), ("norm", "weight"): torch.ones(3)}
    save_all(make_savers(tmp_path, 2), 1, split_evenly(tensors, 2))
    with Checkpoint.open(tmp_path / "step-00000001") as found:
        yield found


def wanted(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Piece:
    count = torch.Size(shape).numel()
    data = torch.empty(count, dtype=dtype)
    return Piece(name, "weight", shape, (0,) * len(shape), shape, 0, count, data)


def test_an_unknown_name_is_refused_with_the_nearest_ones(small):
    with pytest.raises(CheckpointError, match=r"no parameter 'block.0.weight'; did you mean bl"):
        small.read([wanted("block.0.weight", (6, 4))])
    with pytest.raises(CheckpointError, match=r"'zzz'; it holds blocks.0.weight, norm"):
        small.tensor("zzz")


def test_an_unknown_field_is_refused_with_those_that_are_kept(small):
    with pytest.raises(CheckpointError, match=r"no 'exp_avg' of norm; it holds weight"):
        small.tensor("norm", "exp_avg")


def test_another_shape_is_refused_with_both_shapes(small):
    with pytest.raises(CheckpointError, match=r"shape \(6, 4\) in .* and \(6, 3\) in this run"):
        small.read([wanted("blocks.0.weight", (6, 3))])


def test_another_dtype_is_refused_with_both_dtypes(small):
    with pytest.raises(CheckpointError, match=r"is F32 in .* and F64 in this run"):
        small.read([wanted("norm", (3,), torch.float64)])


def test_opening_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"step-00000009: manifest.json is missing"):
        Checkpoint.open(tmp_path / "step-00000009")


@pytest.mark.parametrize(
    ("cut", "count", "message"),
    [
        (Cut((2, 0), (3, 4), 0, 12), 12, "does not lie inside"),
        (Cut((0,), (4,), 0, 4), 4, "does not lie inside"),
        (Cut((0, 0), (4, 4), 0, 17), 17, "0 to 17 do not lie in a box of"),
        (Cut((0, 0), (4, 4), 3, 2), 0, "3 to 2 do not lie"),
        (Cut((0, 0), (4, 4), 0, 16), 15, "need one contiguous dim of 16"),
    ],
)
def test_a_piece_that_contradicts_itself_is_refused(cut, count, message):
    with pytest.raises(CheckpointError, match=message):
        Piece("w", "weight", (4, 4), *cut, torch.zeros(count))


def test_a_dtype_that_safetensors_does_not_know_is_refused():
    with pytest.raises(CheckpointError, match=r"complex64; a checkpoint holds float64, float32"):
        Piece("w", "weight", (1,), (0,), (1,), 0, 1, torch.zeros(1, dtype=torch.complex64))
