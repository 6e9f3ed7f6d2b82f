"""ZeRO as a value: what data-parallel ranks retain whole, and when they reduce and gather.

The four stages are four policies of one engine (Rajbhandari et al. 2019, arXiv:1910.02054):

    stage  retained whole           this rank's part of      gradients are reduced
    0      weights, grads, state    -                        once a step, all-reduce
    1      weights, grads           state                    once a step, reduce-scatter
    2      weights                  state, grads             every micro-batch, reduce-scatter
    3      -                        state, grads, weights    every micro-batch, reduce-scatter

Whole weights are gathered after the update under stages 1 and 2, before each use under stage 3.
State that is offloaded takes its part of a gradient as soon as it is reduced; weights that live in
files are gathered before each use too.
"""

from dataclasses import dataclass

from phalanx.core.layout import Layout


@dataclass(frozen=True)
class ZeroPolicy:
    """Who keeps what of a unit.

    Attributes:
        partitions: master weights, optimizer state and reduced gradients of a rank are its part
            of the vector; else all of it.
        retains_gradients: what has accumulated stays whole after it was reduced, as the memory of
            the next micro-batch; else it is freed.
        retains_weights: whole weights stay from step to step; else they are freed after use.
        retains_until_step_ends: where weights are freed, only when the step is over, rather than
            after each forward and backward.
        offloads_state: master weights and reduced gradients live in a memory of their own.
    """

    partitions: bool
    retains_gradients: bool
    retains_weights: bool
    retains_until_step_ends: bool
    offloads_state: bool

    @classmethod
    def of(cls, layout: Layout) -> "ZeroPolicy":
        """The policy of a layout.

        Example:
            >>> ZeroPolicy.of(Layout(dp=2, zero=3)).retains_weights
            False
        """
        stage, offload = layout.zero_stage, layout.offload
        return cls(
            partitions=stage >= 1,
            retains_gradients=stage <= 1 and not offload.state,
            retains_weights=stage <= 2 and not offload.nvme,
            retains_until_step_ends=not layout.reshard,
            offloads_state=offload.state,
        )

    @property
    def separates_master(self) -> bool:
        """Whether master weights have memory of their own even in the dtype of the weights."""
        return self.offloads_state or not self.retains_weights
