"""Sums of non-negative parts that come nearest to what was measured, by relative error."""

from typing import NamedTuple

import numpy as np

from phalanx.cost.table import Floats

_NORMAL_80 = 1.2816  # standard deviations that hold four of five


class Fit(NamedTuple):
    """Factors of some columns.

    Attributes:
        factors: one for each column, at least 0.
        errors: their standard errors; 0 for a factor that is held at 0.
        spread: standard deviation of ln(measured / fitted).
    """

    factors: Floats
    errors: Floats
    spread: float

    def interval(self, column: int) -> tuple[float, float]:
        """Between which values a factor lies in 80 %."""
        middle, half = float(self.factors[column]), _NORMAL_80 * float(self.errors[column])
        return max(middle - half, 0.0), middle + half


def fit(columns: Floats, measured: Floats, known: Floats | None = None, weight: float = 0.0) -> Fit:
    """Fit measured seconds as a sum of columns.

    Columns whose factor would be negative are left out one by one, the most negative first.

    Args:
        columns: of shape (rows, columns), at least 0.
        measured: of shape (rows,), above 0.
        known: what the factors are thought to be; nan where nothing is known.
        weight: of what is known, in rows of as large a relative error.

    Example:
        >>> sizes = np.array([1.0, 10.0, 100.0])
        >>> found = fit(np.stack([np.ones(3), sizes], axis=1), 2.0 + 0.5 * sizes)
        >>> found.factors.round(6).tolist()
        [2.0, 0.5]
    """
    rows, goal = columns / measured[:, None], np.ones(len(measured))
    if known is not None:
        held = np.flatnonzero(np.isfinite(known))
        more = np.zeros((len(held), columns.shape[1]))
        more[np.arange(len(held)), held] = weight / known[held]
        rows, goal = np.vstack([rows, more]), np.concatenate([goal, np.full(len(held), weight)])
    kept = list(range(columns.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(rows[:, kept], goal, rcond=None)
        if len(kept) == 1 or found.min() >= 0:
            break
        kept.pop(int(found.argmin()))
    factors, errors = np.zeros(columns.shape[1]), np.zeros(columns.shape[1])
    factors[kept] = np.maximum(found, 0.0)
    residual = goal - rows @ factors
    freedom = max(len(goal) - len(kept), 1)
    covariance = np.linalg.pinv(rows[:, kept].T @ rows[:, kept]) * (residual @ residual / freedom)
    errors[kept] = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    fitted = np.maximum(columns @ factors, 1e-12)
    return Fit(factors, errors, float(np.std(np.log(measured / fitted))))
