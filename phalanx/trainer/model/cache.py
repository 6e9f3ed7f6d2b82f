"""Keys and values of the tokens that were read, so that the next token need not read them again."""

import torch
from torch import Tensor

from phalanx.trainer.ops.flash import ScoreRule, window_mask
from phalanx.trainer.ops.kernels import PLAIN_SCORES, attention
from phalanx.trainer.parallel.comm import Group
from phalanx.trainer.parallel.context import ContextParallel
from phalanx.trainer.parallel.ledger import Ledger


class KeyValueCache(ContextParallel):
    """Stands where a micro-batch names the rest of its sequences: here it is what came before.

    A rank holds whole sequences, of its own heads. Every pass asks its layers in the same order,
    which tells them apart.
    """

    def __init__(self) -> None:
        super().__init__(Group("context", (0,), None, Ledger()))
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._turn = 0

    @property
    def length(self) -> int:
        """How many tokens were read."""
        return len(self._kept[0][0]) if self._kept else 0

    def begin(self) -> None:
        """Start a pass, at the first layer."""
        self._turn = 0

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        rule: ScoreRule = PLAIN_SCORES,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """softmax(q k^T / sqrt(d)) v over all tokens up to each new one.

        Args:
            q: [n, b, a, d], of the new tokens.
            k: [n, b, g, d].
            v: [n, b, g, d_v].
            documents: none: a text is one.
            rule: how scores are made, and which of them count.
            sinks: [a], a score of each head that selects nothing.

        Returns:
            [n, b, a d_v].
        """
        k, v = self._with_the_past(k, v)
        mask = None
        if len(k) > len(q) or 0 < rule.window < len(k):
            places = torch.arange(len(k), device=q.device)
            mask = window_mask(places[-len(q) :], places, rule.window or len(k))
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return attention(q, k, v, mask, rule, sinks).permute(2, 0, 1, 3).flatten(2)

    def _with_the_past(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self._turn == len(self._kept):
            self._kept.append((k, v))
        else:
            before = self._kept[self._turn]
            self._kept[self._turn] = torch.cat((before[0], k)), torch.cat((before[1], v))
        self._turn += 1
        return self._kept[self._turn - 1]
