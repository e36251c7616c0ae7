"""Tests that may be looked at after every run: evidence, intervals, and the level of one try among many.

Differences of pairs of runs count as normal with one unknown deviation. The evidence against "no gain" is
the likelihood ratio of a one-sided t-test, mixed over sizes of the gain: an e-process. Its mean is at most 1
at any time as long as there is no gain, so it exceeds 1 / p with probability p at most, however often one
looks (Perez-Ortiz, Lardy, de Heide, Grunwald: arXiv:2208.07610).

Over many tries e-LOND says how much evidence each needs: among the tries that are called gains, the expected
share of false ones stays at most ALPHA, however the tries depend on each other (Xu, Ramdas: Online multiple
testing with e-values, arXiv:2311.06412).
"""
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ALPHA = 0.1         # of `try`: expected share of false gains among all gains
ALPHA_LOSS = 0.05   # of a single change: probability that it is called a loss but is none
FIRST_NIGHT = 50    # tries that share three quarters of ALPHA
SIZES = (0.5, 1.0, 2.0, 4.0, 8.0)   # gains that the mixture weighs alike, in deviations of a difference
INTERVAL = 0.95
FAR = 300.0         # deviations that no interval reaches


class Noise(NamedTuple):
    """What is known of the deviation of differences before a series begins."""
    squares: float = 0.0    # sum of squared deviations from means
    df: int = 0


class Series(NamedTuple):
    """Differences of pairs of runs so far, positive where the change is better."""
    mean: float
    std: float      # of a single difference
    df: int         # that std was estimated with
    n: int          # how many there are

    def negative(self) -> "Series":
        return self._replace(mean=-self.mean)


def noise_of(gains: Sequence[float]) -> Noise:
    """What a list of differences tells of their deviation."""
    return Noise(float(np.var(gains)) * len(gains), len(gains) - 1) if len(gains) > 1 else Noise()


def series_of(gains: Sequence[float], noise: Noise = Noise()) -> Series:
    """The series of a list of differences, whose deviation is also known from earlier ones."""
    own = noise_of(gains)
    df = own.df + noise.df
    std = ((own.squares + noise.squares) / df) ** 0.5 if df else 0.0
    return Series(float(np.mean(gains)), std, df, len(gains))


def evidence(series: Series) -> float:
    """The e-value against "no gain"; 1 while nothing is known of the deviation."""
    if series.df < 1 or series.std <= 0:
        return 1.0      # without any deviation it is the same run twice
    root = math.sqrt(series.n)
    ratios = t_ratio(series.mean * root / series.std, series.df, np.array(SIZES) * root)
    return float(ratios.mean())


def t_ratio(t: float, df: int, shifts: np.ndarray) -> np.ndarray:
    """Densities of noncentral t distributions / that of the central one, at t: scipy's nct.pdf / t.pdf, which
    fails for large t and shifts. By the integral over u of u**df exp(-(u - center)**2 / 2)."""
    from scipy.special import gammaln, logsumexp
    center = shifts * t / math.sqrt(df + t * t)
    peak = (center + np.sqrt(center**2 + 4 * df)) / 2
    step = 0.05
    u = peak[:, None] + step * np.arange(-180, 181)
    inside = u > 0
    terms = df * np.log(np.where(inside, u, 1.0)) - (u - center[:, None]) ** 2 / 2
    whole = logsumexp(np.where(inside, terms, -np.inf), axis=1) + math.log(step)
    central = (df - 1) / 2 * math.log(2) + gammaln((df + 1) / 2)
    return np.exp(np.minimum(700.0, whole - central - shifts**2 * df / (2 * (df + t * t))))


def interval(series: Series) -> tuple[float, float]:
    """What the mean gain may be: all values against which there is too little evidence on either side. It
    holds with probability INTERVAL, however often one looks."""
    from scipy import optimize
    if series.df < 1 or series.std <= 0:
        return -math.inf, math.inf
    def short_of(shift: float) -> float:
        """Evidence for a mean that many deviations above what is assumed, less what is needed."""
        assumed = series._replace(mean=shift * series.std)
        return math.log(max(evidence(assumed), 1e-300)) - math.log(2 / (1 - INTERVAL))

    if short_of(FAR) < 0:
        return -math.inf, math.inf
    half = float(optimize.brentq(short_of, 1e-9, FAR)) * series.std
    return series.mean - half, series.mean + half


def spending(number: int) -> float:
    """The share of ALPHA that this try gets, counted from 1: the first FIRST_NIGHT tries split three quarters
    of it evenly, the next twice as many split three quarters of the rest, and so on."""
    size = FIRST_NIGHT
    share = 0.75
    while number > size:
        number -= size
        size *= 2
        share *= 0.25
    return share / size


def needed_evidence(number: int, found: int) -> float:
    """The evidence at which e-LOND calls this try a gain, after `found` gains among those before it."""
    return 1 / (ALPHA * spending(number) * (found + 1))


def after(series: Series, more: int, mean: float) -> Series:
    """The series as it would stand after that many more differences, with this mean over all of them."""
    return Series(mean, series.std, series.df + more, series.n + more)


def verdict(series: Series, needed: float, most: int) -> tuple[str, bool]:
    """"gains", "loses" or "cannot tell", and whether the series may stop. needed: evidence for a gain. most:
    differences at most. It also stops where it would not be called a gain even if the gain turned out two
    standard errors better than it looks."""
    if evidence(series) >= needed:
        return "gains", True
    if evidence(series.negative()) >= 1 / ALPHA_LOSS:
        return "loses", True
    if series.n >= most:
        return "cannot tell", True
    best = series.mean + 2 * series.std / math.sqrt(series.n)
    hopeless = series.df > 1 and series.n > 2 and evidence(after(series, most - series.n, best)) < needed
    return "cannot tell", hopeless


def more_needed(series: Series, needed: float, limit: int = 1000) -> int | None:
    """Further differences until a gain or loss as large as the mean is now would be told; None above the
    limit."""
    if series.df < 1 or series.mean == 0:
        return None
    size = abs(series.mean)
    if series.mean < 0:
        needed = min(needed, 1 / ALPHA_LOSS)
    return next((more for more in range(1, limit + 1) if evidence(after(series, more, size)) >= needed), None)
