"""A thousand ways to damage a checkpoint: each is noticed, and the one before is used."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import make_savers, reseal, same_bits, save_all, split_evenly

from phalanx.trainer.checkpoint import newest

WORLD = 2
MUTATIONS = 1000


def content(step: int) -> torch.Tensor:
    return torch.arange(3000.0).reshape(60, 50) * (step + 0.25)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2."""
    directory = tmp_path_factory.mktemp("intact")
    savers = make_savers(directory, WORLD)
    for step in (1, 2):
        save_all(savers, step, split_evenly({("w", "weight"): content(step)}, WORLD))
    return directory


def a_file(path: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(file for file in path.iterdir() if file.is_file()))


def flip_a_bit(path: Path, rng: random.Random) -> None:
    file = a_file(path, rng)
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def zero_a_block(path: Path, rng: random.Random) -> None:
    file = a_file(path, rng)
    data = bytearray(file.read_bytes())
    first = rng.randrange(len(data))
    block = data[first : first + rng.choice((16, 512, 4096))]
    if not any(block):
        return flip_a_bit(path, rng)
    data[first : first + len(block)] = bytes(len(block))
    file.write_bytes(data)
    return None


def cut_short(path: Path, rng: random.Random) -> None:
    file = a_file(path, rng)
    data = file.read_bytes()
    file.write_bytes(data[: rng.randrange(len(data))])


def extend(path: Path, rng: random.Random) -> None:
    file = a_file(path, rng)
    file.write_bytes(file.read_bytes() + rng.randbytes(rng.choice((1, 8, 4096))))


def swap_ranks(path: Path, rng: random.Random) -> None:
    one, other = path / "rank-00000.safetensors", path / "rank-00001.safetensors"
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def take_from_another_step(path: Path, rng: random.Random) -> None:
    name = a_file(path, rng).name
    shutil.copyfile(path.with_name("step-00000001") / name, path / name)


def delete(path: Path, rng: random.Random) -> None:
    a_file(path, rng).unlink()


def duplicate(path: Path, rng: random.Random) -> None:
    """The whole of an older one under a later name."""
    shutil.rmtree(path)
    shutil.copytree(path.with_name("step-00000001"), path)


def edit_the_manifest(path: Path, rng: random.Random) -> None:
    """Without its checksum, as a hand does."""
    file = path / "manifest.json"
    lines = file.read_text().splitlines()
    at = rng.randrange(len(lines))
    lines[at] = lines[at].replace("1", "2") + rng.choice((" ", "", "\t")) + " "
    file.write_text("\n".join(lines) + "\n")


def forge_a_hash(path: Path, rng: random.Random) -> None:
    """With a right checksum: no hash, that of nothing, or any other."""
    shas = ("", "0" * 64, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
    name = f"rank-0000{rng.randrange(WORLD)}.safetensors"

    def change(table: dict) -> None:
        table["files"][name]["sha256"] = rng.choice(shas)

    reseal_table(path / "manifest.json", change)


def reseal_table(path: Path, change: Callable[[dict], None]) -> None:
    table = json.loads(path.read_bytes())
    del table["sha256"]
    change(table)
    reseal(path, lambda _: json.dumps(table)[:-1].encode() + b",\n")


KINDS = (
    flip_a_bit,
    zero_a_block,
    cut_short,
    extend,
    swap_ranks,
    take_from_another_step,
    delete,
    duplicate,
    edit_the_manifest,
    forge_a_hash,
)


def survives(directory: Path, mutate: Callable[[Path, random.Random], None], seed: int) -> bool:
    """Whether a damage is taken for a checkpoint."""
    mutate(directory / "step-00000002", random.Random(seed))
    events: list[str] = []
    found = newest(directory, events.append)
    assert found is not None
    with found:
        one_before = found.step == 1 and same_bits(found.tensor("w"), content(1))
    aside = [event for event in events if "set aside as corrupt-step-00000002" in event]
    return not (one_before and len(aside) == 1)


def test_of_a_thousand_mutations_none_is_taken_for_a_checkpoint(
    intact: Path, tmp_path: Path
) -> None:
    copy, survivors = tmp_path / "copy", []
    shutil.copytree(intact, copy)
    for seed in range(MUTATIONS):
        kind = KINDS[seed % len(KINDS)]
        if survives(copy, kind, seed):
            survivors.append((kind.__name__, seed))
        for path in copy.glob("*step-00000002"):
            shutil.rmtree(path)
        shutil.copytree(intact / "step-00000002", copy / "step-00000002")
    assert survivors == []


def test_what_is_not_damaged_is_taken(intact: Path, tmp_path: Path) -> None:
    shutil.copytree(intact, tmp_path / "copy")
    assert survives(tmp_path / "copy", lambda path, rng: None, 0)
