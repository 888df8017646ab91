"""Pace and grace: pure arithmetic on step times, credits and versions."""

from collections.abc import Sequence
import statistics


def slowest_step_s(times: Sequence[float], winsor_factor: float) -> float:
  """The slowest step time, counted at most as winsor_factor x the median.

  Args:
    times: mean step time of each live island, seconds, > 0.
    winsor_factor: one very slow island may not stretch a window beyond this.

  Returns:
    Seconds; 0 for no islands.
  """
  if not times:
    return 0.0
  return min(max(times), winsor_factor * statistics.median(times))


def holders_needed(active: int, quorum: int) -> int:
  """How many of `active` islands must hold credits before a round opens.

  A majority, so that the median island sets the pace; never fewer than K and
  never more than there are. quorum: K, or 0 for all.
  """
  if quorum == 0:
    return active
  return min(active, max(quorum, active // 2 + 1))


def charge(credits: int, stride: int) -> int:
  """Credits after a round opened: minus n, clipped to [-2n, n]."""
  return max(-2 * stride, min(stride, credits - stride))


def grace_s(
  *,
  gamma: float,
  overlap_steps: int,
  step_s: float,
  quorum_s: float,
  sync_s: float | None,
  cap_s: float,
) -> float:
  """Adaptive grace window.

  xi = clip(gamma (tau n xi_step - xi_quorum - xi_sync), 0, cap), where
  gamma -> gamma, tau n -> overlap_steps, xi_step -> step_s, xi_quorum ->
  quorum_s, xi_sync -> sync_s. Until there is an estimate of xi_sync (None)
  the window is its cap. The budget of the paper is tau xi_step; with n > 1
  inner steps between rounds ours is tau n xi_step, the same at n = 1.

  Returns:
    Seconds to wait for further contributions after the quorum.

  Reference: Decoupled DiLoCo (arXiv 2604.21428), equation 3.
  """
  if sync_s is None:
    return max(0.0, cap_s)
  slack = overlap_steps * step_s - quorum_s - sync_s
  return max(0.0, min(gamma * slack, cap_s))


def round_period_steps(
  *, period: int, fragments: int, overlap: int, round_steps: float
) -> float:
  """Inner steps between merges of a fragment that this round time allows.

  max(H, P round_steps / max(1, tau)): period -> H, fragments -> P,
  overlap -> tau, round_steps -> mean time of a round in inner steps.
  """
  return max(float(period), fragments * round_steps / max(1, overlap))


def moving(old: float | None, new: float, decay: float) -> float:
  """Exponential moving average; the first value stands as it is."""
  return new if old is None else (1 - decay) * old + decay * new
