"""What the numbers of several runs mean: their mean and interval, t-tests, a verdict in words."""
import itertools
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from records.judge.logs import HIGHER_IS_BETTER, show

ALPHA = 0.025       # of compare: one-sided level
POWER = 0.9         # how surely an effect that compare names is found


class Stats(NamedTuple):
    n: int
    mean: float
    std: float | None           # with n - 1; None for one value
    low: float | None           # of the mean's 95 % interval
    high: float | None


class Test(NamedTuple):
    t: float                    # positive: on the better side
    df: float
    p: float                    # one-sided: this or more by chance


def describe(values: Sequence[float]) -> Stats:
    """Stats of numbers."""
    numbers = np.asarray(values, float)
    mean = float(numbers.mean())
    if len(values) < 2:
        return Stats(len(values), mean, None, None, None)
    from scipy import stats
    std = float(numbers.std(ddof=1))
    half = float(stats.t.ppf(0.975, len(values) - 1)) * std / len(values) ** 0.5
    return Stats(len(values), mean, std, mean - half, mean + half)


def target_test(values: Sequence[float], target: float, metric: str) -> Test | None:
    """One-sample t-test that the mean is better than target. None for a single value."""
    if len(values) < 2:
        return None
    from scipy import stats
    sign = 1 if metric in HIGHER_IS_BETTER else -1
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        found = stats.ttest_1samp(sign * np.asarray(values, float), sign * target, alternative="greater")
    return Test(float(found.statistic), float(found.df), float(found.pvalue))


def welch_test(a: Sequence[float], b: Sequence[float],
               metric: str) -> tuple[Test | None, tuple[float, float] | None]:
    """(Welch's test that b is better than a, 95 % interval of b - a). (None, None) without two runs each."""
    if min(len(a), len(b)) < 2:
        return None, None
    from scipy import stats
    sign = 1 if metric in HIGHER_IS_BETTER else -1
    first = np.asarray(a, float)
    second = np.asarray(b, float)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        found = stats.ttest_ind(sign * second, sign * first, equal_var=False, alternative="greater")
        span = stats.ttest_ind(second, first, equal_var=False).confidence_interval(0.95)
    test = Test(float(found.statistic), float(found.df), float(found.pvalue))
    return test, (float(span.low), float(span.high))


@cache
def detectable_shift(n: int, alpha: float, power: float) -> float:
    """detectable() in units of the mean difference's standard error."""
    from scipy import optimize, stats
    df = 1.5 * (n - 1)
    critical = stats.t.isf(alpha, df)
    return float(optimize.brentq(lambda shift: stats.nct.sf(critical, df, shift) - power, 0, 200))


def detectable(std: float, n: int, alpha: float = ALPHA, power: float = POWER) -> float:
    """The difference of means that Welch's test with n >= 3 runs a side finds with that power; None below 3.
    Its degrees of freedom, between n - 1 and 2n - 2 by chance, count as 1.5 (n - 1), which simulations
    bear out."""
    return None if n < 3 else detectable_shift(n, alpha, power) * std * (2 / n) ** 0.5


def cautious_std(std: float, df: int) -> float:
    """An upper bound of the true deviation, right in four of five cases, of one measured with df."""
    from scipy import stats
    return std * float(df / stats.chi2.ppf(0.2, df)) ** 0.5


def runs_needed(difference: float, std: float, alpha: float = ALPHA, power: float = POWER) -> int | None:
    """Runs a side until that difference would be found; None above 1,000."""
    for n in itertools.chain(range(3, 40), range(40, 1001, 20)):
        if detectable(std, n, alpha, power) <= abs(difference):
            return n
    return None


def stats_line(metric: str, s: Stats) -> str:
    """n, mean, std and interval of Stats, in the digits of the metric."""
    text = f"n={s.n} mean {show(metric, s.mean)}"
    if s.std is not None:
        text += f" std {show(metric, s.std)} (95 %: {show(metric, s.low)} to {show(metric, s.high)})"
    return text


def show_p(p: float) -> str:
    """A p-value with 4 decimals, or <1e-4 where these would all be 0."""
    return "<1e-4" if p < 1e-4 else f"{p:.4f}"


def p_term(p: float) -> str:
    """The same with its name: p=0.0123 or p<1e-4."""
    return f"p={show_p(p)}".replace("=<", "<")


def test_line(test: Test | None) -> str:
    """A Test as text; None stands for a single run."""
    if test is None:
        return "one run, no test"
    return f"t={test.t:.2f} df={test.df:.3g} {p_term(test.p)}"


def verdict(test: Test, difference: float, std: float, n: int) -> str:
    """Better, worse, or how many more runs a side it takes to tell."""
    if test.p < ALPHA:
        return "better"
    if 1 - test.p < ALPHA:
        return "worse"
    need = runs_needed(difference, std) if std else None
    if need:
        more = max(1, need - n)
        return f"cannot tell: needs about {more} more run{'s' * (more > 1)} per side"
    return f"cannot tell: {abs(difference):.2g} would need over 1,000 runs per side"


def judge(a: Sequence[float], b: Sequence[float], metric: str) -> dict[str, Any]:
    """Is b better than a? {verdict, p, difference, interval, ratio, detectable, ...}."""
    first = describe(a)
    second = describe(b)
    difference = second.mean - first.mean
    out = {"a": first._asdict(), "b": second._asdict(), "difference": difference,
           "ratio": second.mean / first.mean}
    test, interval = welch_test(a, b, metric)
    if test is None:
        return out | {"verdict": "cannot tell: each side needs two runs or more"}
    std = ((first.std ** 2 + second.std ** 2) / 2) ** 0.5
    n = min(first.n, second.n)
    return out | {"t": test.t, "df": test.df, "p": test.p, "interval": interval,
                  "detectable": detectable(cautious_std(std, first.n + second.n - 2), n),
                  "verdict": verdict(test, difference, std, n)}


def judge_lines(metric: str, found: dict[str, Any]) -> list[str]:
    """What judge() found, as text."""
    if "p" not in found:
        return [f"verdict: {found['verdict']}"]
    low, high = found["interval"]
    power = "find nothing reliably; that takes at least three per side"
    if found["detectable"]:
        power = f"find a difference of {found['detectable']:.6f} nine times in ten"
    return [f"B - A: {found['difference']:+.6f} (95 %: {low:+.6f} to {high:+.6f}), "
            f"ratio {found['ratio']:.5f}",
            f"Welch: t={found['t']:.2f} df={found['df']:.1f} {p_term(found['p'])}; this many runs {power}",
            f"verdict: {found['verdict']}"]
