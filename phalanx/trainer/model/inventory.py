"""Every parameter of a whole model, whichever ranks hold it."""

from collections.abc import Iterator

from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe
from phalanx.trainer.model.block import Block
from phalanx.trainer.model.ends import Embedding, Head
from phalanx.trainer.model.parameters import Declaration, declared_in
from phalanx.trainer.parallel.comm import Group
from phalanx.trainer.parallel.ledger import Ledger
from phalanx.trainer.parallel.tensor import TensorParallel


def declarations(shape: ModelShape) -> Iterator[Declaration]:
    """Every parameter of the whole model once, in the order of first use."""
    recipe = Recipe()
    tp = TensorParallel(Group("tensor", (0,), None, Ledger()), sequence=False)
    embedding = Embedding(shape, recipe, tp)
    blocks = [Block(i, shape, recipe, tp) for i in range(shape.layers)]
    head = Head(shape, recipe, tp, embedding.table if shape.tied else None)
    seen = set()
    for module in (embedding, *blocks, head):
        for held in declared_in(module):
            if held.declaration.name not in seen:
                seen.add(held.declaration.name)
                yield held.declaration
