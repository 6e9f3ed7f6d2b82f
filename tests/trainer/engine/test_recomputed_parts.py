"""Parts of a block that are recomputed: nothing of them is kept, and nothing changes."""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from phalanx.trainer.engine.saved import SavedTensors


def double(x: Tensor) -> Tensor:
    return 2 * x


def twice(x: Tensor) -> list[Tensor]:
    return [x + 1, x * 3]


def test_a_tensor_of_a_forgotten_part_is_made_again_once_for_all_its_readers() -> None:
    made = []

    def make(x: Tensor) -> Tensor:
        made.append(x)
        return 2 * x

    saved, x = SavedTensors(frozenset({"norms"})), torch.ones(3, requires_grad=True)
    with saved.watching():
        (y,) = saved.run("norms", make, x)
        z = (y * y).sum() + (y.exp() * y).sum()
    del y
    assert len(made) == 1
    z.backward()
    assert len(made) == 2
    y = torch.full((3,), 2.0)
    torch.testing.assert_close(x.grad, 2 * (2 * y + y.exp() * y + y.exp()))


def test_forgotten_tensors_may_be_made_of_forgotten_tensors() -> None:
    grads = []
    for parts in (frozenset[str](), frozenset({"norms", "mlp"})):
        saved, x = SavedTensors(parts), torch.linspace(0, 1, 4, requires_grad=True)
        with saved.watching():
            (a,) = saved.run("norms", double, x)
            b, c = saved.run("mlp", twice, a)
            (b * c * c.t()).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


@pytest.mark.parametrize("parts", [frozenset[str](), frozenset({"norms"})])
def test_only_the_memory_of_forgotten_tensors_is_let_go(parts: frozenset[str]) -> None:
    saved, x = SavedTensors(parts), torch.ones(1000, requires_grad=True)
    with saved.watching():
        (y,) = saved.run("norms", double, x)
        out = y.square().sum()
    storage = StorageWeakRef(y.untyped_storage())
    del y
    assert storage.expired() == bool(parts)
    out.backward()
    torch.testing.assert_close(x.grad, torch.full((1000,), 8.0))


def test_memory_that_is_shared_cannot_be_forgotten_by_halves() -> None:
    saved, x = SavedTensors(frozenset({"norms"})), torch.ones(4, requires_grad=True)
    with saved.watching(), pytest.raises(AssertionError, match="shares memory"):
        saved.run("norms", lambda x: list((2 * x).chunk(2)), x)


def test_where_nothing_is_learned_nothing_is_packed() -> None:
    saved, x = SavedTensors(frozenset({"norms"})), torch.ones(4)
    packed = []
    with torch.no_grad(), saved_tensors_hooks(packed.append, lambda x: x), saved.watching():
        assert saved.run("norms", double, x)[0].sum() == 8
    assert packed == []
