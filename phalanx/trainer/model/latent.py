"""Multi-head latent attention: queries, keys and values grow out of short vectors.

    c_q = norm(W_DQ x)          q = [W_UQ c_q], the last d_r channels of each head rotated
    c_kv = norm(W_DKV x)        k = [W_UK c_kv; rotated W_KR x]        v = W_UV c_kv

The rotated part of the key is one for all heads. Without a rank for queries, q = W_Q x.
Sources: DeepSeek-AI 2024 (arXiv:2405.04434), section 2.1; (arXiv:2412.19437), section 2.1.1.

The products that compress are whole on every rank, since all heads read what they make; those that
expand are cut by heads. With sequence parallelism a rank compresses and normalizes its own tokens,
and what travels is short: c_q, c_kv and the rotary key, instead of x.
"""

import torch
from torch import Tensor, nn

from phalanx.core.model import ModelShape
from phalanx.trainer.engine.saved import SavedTensors
from phalanx.trainer.model.attend import Attending, attend, rule_of
from phalanx.trainer.model.batch import MicroBatch
from phalanx.trainer.model.layers import Projection, RMSNorm
from phalanx.trainer.model.rotary import rotary_angles, rotate
from phalanx.trainer.parallel.tensor import TensorParallel
from phalanx.trainer.precision.product import MatrixCut


class LatentAttention(nn.Module):
    """Causal self-attention whose values may be narrower than its keys."""

    def __init__(self, prefix: str, shape: ModelShape, tp: TensorParallel, layer: int = 0) -> None:
        super().__init__()
        self.shape, self.tp, self.alone = shape, tp, tp.alone()
        self.rule = rule_of(shape, layer)
        self.saved = SavedTensors()
        h, a, r_q, r_kv = shape.hidden, shape.heads, shape.q_lora_rank, shape.kv_lora_rank

        def product(name: str, n_in: int, n_out: int, cut: MatrixCut) -> Projection:
            return Projection(f"{prefix}.{name}", (n_in, n_out), cut, tp)

        def norm(name: str, width: int) -> RMSNorm:
            return RMSNorm(f"{prefix}.{name}", width, shape.norm_eps, needs_tp_reduce=tp.sequence)

        self.q_down = product("q_down", h, r_q, "whole") if r_q else None
        self.q_norm = norm("q_norm", r_q) if r_q else None
        self.q = product("q_up" if r_q else "q", r_q or h, a * shape.qk_width, "out")
        self.kv_down = product("kv_down", h, r_kv, "whole")
        self.kv_norm = norm("kv_norm", r_kv)
        self.k_rope = product("k_rope", h, shape.qk_rope, "whole")
        self.k_up = product("k_up", r_kv, a * shape.qk_nope, "out")
        self.v_up = product("v_up", r_kv, a * shape.v_head, "out")
        self.o = product("o", a * shape.v_head, h, "in")

    def forward(self, x: Tensor, batch: MicroBatch) -> Tensor:
        """[s/t, b, h] to [s/t, b, h]; this rank computes a/t of the heads.

        Args:
            x: the dtype of computation, normalized; s/t is s without sequence parallelism.
            batch: says positions, documents, and which ranks hold the rest of the sequences.
        """
        query, latent, rope = self._compress(x)
        (q,) = self.tp.columns(query, self.q)
        k, v = self.tp.columns(self.kv_norm(latent), self.k_up, self.v_up)
        q, k, v = (
            y.unflatten(-1, (-1, width))
            for y, width in (
                (q, self.shape.qk_width),
                (k, self.shape.qk_nope),
                (v, self.shape.v_head),
            )
        )
        rope = self.tp.whole(rope).unsqueeze(2)
        if self.shape.positions == "rope":
            angles = rotary_angles(self.shape, batch.positions, x.dtype, batch.seq)
            q, rope = rotate(q, angles), rotate(rope, angles)
        k = torch.cat([k, rope.expand(-1, -1, k.shape[2], -1)], -1)
        y = attend(q, k, v, batch, Attending(self.rule, None, "core" in self.saved.parts))
        return self.tp.rows(y, self.o)

    def _compress(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's tokens: what queries are made of, the latent of keys and values, rotary key.

        Returns:
            [s/t, b, r_q], or x itself; [s/t, b, r_kv]; [s/t, b, d_r].
        """
        if self.q_down is None or self.q_norm is None:
            latent, rope = self.alone.columns(x, self.kv_down, self.k_rope)
            return x, latent, rope
        query, latent, rope = self.alone.columns(x, self.q_down, self.kv_down, self.k_rope)
        return self.q_norm(query), latent, rope
