"""Keeps Python from pausing a drag: everything that was loaded is looked through no more."""

import gc

ALLOCATED = (
    100_000  # objects, before the young ones are looked through; a drawn schedule makes 16,000
)


def spare_drags() -> None:
    """Take what is there out of the collector's rounds, and let it make fewer.

    At p=16, m=256 the rounds were two thirds of the time of the slowest frames, and freed nothing:
    records and cells hold no cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(ALLOCATED, 20, 50)
