"""Messages as operators of torch, so that a compiled block can contain them.

A compiler sees an operator from outside only: what it takes, what it gives, and that it must run.
Inside it is the same message of `comm.Group`, noted in the same ledger, and complete when the
operator returns.
"""

from weakref import WeakValueDictionary

import torch
from torch import Tensor

from phalanx.trainer.parallel.comm import Group

# By the name that an operator can carry: the newest group of these ranks.
_groups: WeakValueDictionary[str, Group] = WeakValueDictionary()


def enlist(group: Group) -> None:
    """Make a group known to the operators, under its name."""
    _groups[group.name] = group


@torch.library.custom_op("phalanx::all_gather", mutates_args=())
def all_gather(x: Tensor, group: str, size: int, purpose: str) -> Tensor:
    """Every rank's `x`, [n, ...], in rank order: [size n, ...].

    Args:
        x: any strides.
        group: the name of one that was enlisted.
        size: its ranks.
        purpose: of the message, for the ledger.
    """
    out = x.new_empty((x.shape[0] * size, *x.shape[1:]))
    _groups[group].all_gather(out, x.contiguous(), purpose).wait()
    return out


@all_gather.register_fake
def _(x: Tensor, group: str, size: int, purpose: str) -> Tensor:
    return x.new_empty((x.shape[0] * size, *x.shape[1:]))


@torch.library.custom_op("phalanx::reduce_scatter", mutates_args=())
def reduce_scatter(x: Tensor, group: str, size: int, purpose: str) -> Tensor:
    """This rank's part, [n / size, ...], of the sum of every rank's `x`, [n, ...].

    Args:
        x: any strides; left as it is.
        group: the name of one that was enlisted.
        size: its ranks; they divide n.
        purpose: of the message, for the ledger.
    """
    out = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    _groups[group].reduce_scatter(out, x.contiguous().clone(), purpose).wait()
    return out


@reduce_scatter.register_fake
def _(x: Tensor, group: str, size: int, purpose: str) -> Tensor:
    return x.new_empty((x.shape[0] // size, *x.shape[1:]))


@torch.library.custom_op("phalanx::all_reduce", mutates_args=())
def all_reduce(x: Tensor, group: str, purpose: str) -> Tensor:
    """The sum of every rank's `x`, like it and contiguous.

    Args:
        x: any shape and strides; left as it is.
        group: the name of one that was enlisted.
        purpose: of the message, for the ledger.
    """
    out = x.clone(memory_format=torch.contiguous_format)
    _groups[group].all_reduce(out, purpose).wait()
    return out


@all_reduce.register_fake
def _(x: Tensor, group: str, purpose: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
