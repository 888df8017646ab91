"""How long an island's steps take: noise, stragglers, standing still."""

import dataclasses
import random


@dataclasses.dataclass(frozen=True)
class ComputeSettings:
  """Seconds of virtual time."""

  step_s: float = 1.0  # mean inner step
  step_cv: float = 0.0  # standard deviation / mean
  speeds: tuple[float, ...] = ()  # factor for each island; 1 where not given
  lag_s: float = 0.0  # a step's end is seen this long after its boundary
  encode_s: float = 0.005
  stage_s: float = 0.0
  merge_s: float = 0.005

  def speed(self, index: int) -> float:
    return self.speeds[index] if index < len(self.speeds) else 1.0

  @property
  def slowest_s(self) -> float:
    """Mean step of the slowest island."""
    return self.step_s / min((1.0, *self.speeds))


def noisy(rng: random.Random, mean: float, cv: float) -> float:
  """Gamma noise: positive, with the mean and variation asked for."""
  if not cv or not mean:
    return mean
  shape = 1 / cv**2
  return rng.gammavariate(shape, mean / shape)


class StepTimes:
  """The steps of one island, one after the other."""

  def __init__(self, settings: ComputeSettings, index: int, rng: random.Random):
    self._mean = settings.step_s / settings.speed(index)
    self._cv = settings.step_cv
    self._rng = rng
    self._slow, self._slow_until = 1.0, 0.0
    self._stalled_until = 0.0

  def straggle(self, factor: float, until: float) -> None:
    self._slow, self._slow_until = factor, until

  def stall(self, until: float) -> None:
    """No step ends before this."""
    self._stalled_until = max(self._stalled_until, until)

  def next_s(self, now: float) -> float:
    """How long the step takes that begins now."""
    took = noisy(self._rng, self._mean, self._cv)
    if now < self._slow_until:
      took *= self._slow
    return max(took, self._stalled_until - now)

  def stalled_for(self, now: float) -> float:
    """How much longer a step that should end now takes."""
    return max(0.0, self._stalled_until - now)
