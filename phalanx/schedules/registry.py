"""The schedules by name. A new one is a file beside this one, and a line here.

One that lives elsewhere needs no line: a layout names it as `module:attribute`.
"""

from importlib import import_module

from phalanx.core.errors import UsageError, unknown
from phalanx.schedules.dualpipe import DUALPIPE, DUALPIPEV
from phalanx.schedules.file import spec_of_file
from phalanx.schedules.gpipe import GPIPE
from phalanx.schedules.interleaved import INTERLEAVED
from phalanx.schedules.one_f_one_b import ONE_F_ONE_B
from phalanx.schedules.pipedream import PIPEDREAM
from phalanx.schedules.spec import ScheduleSpec
from phalanx.schedules.zero_bubble import ZB_H1, ZB_H2, ZB_V

SPECS = (
    GPIPE,
    ONE_F_ONE_B,
    INTERLEAVED,
    ZB_H1,
    ZB_H2,
    ZB_V,
    DUALPIPE,
    DUALPIPEV,
    PIPEDREAM,
)
NAMES = tuple(spec.name for spec in SPECS)


def find_schedule(name: str) -> ScheduleSpec:
    """The schedule that a layout names.

    Args:
        name: one of `NAMES`; a path that ends in `.csv`, of a file with one line of actions per
            rank; or `module:attribute`, where Python finds a `ScheduleSpec`.

    Raises:
        UsageError: there is none; the message has the nearest names.

    Example:
        >>> find_schedule("zb-v").description
        'stages in a V: no bubble where F = I = W, in the memory of 1F1B'
    """
    if name.endswith(".csv"):
        return spec_of_file(name)
    if ":" in name:
        return _imported(name)
    found = next((spec for spec in SPECS if spec.name == name), None)
    if found is None:
        raise unknown("schedule", name, NAMES)
    return found


def _imported(name: str) -> ScheduleSpec:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"schedule={name} cannot be imported ({error}); write module:attribute, of a module "
            "that Python finds from here"
        ) from error
    if not isinstance(found, ScheduleSpec):
        raise UsageError(f"schedule={name} is no ScheduleSpec but a {type(found).__name__}")
    return found
