"""Real time, as the machines see it."""

import time
from typing import Protocol


class Clock(Protocol):
  """Seconds since some start; never goes back."""

  def now(self) -> float: ...


class RealClock:
  """Seconds since this clock was made, or since a given wall-clock time.

  With `started_wall_s` the processes of one run share an origin, so that
  `t_s` in their files can be compared. After that it is monotonic.
  """

  def __init__(self, started_wall_s: float | None = None):
    offset = 0.0
    if started_wall_s is not None:
      offset = time.time() - started_wall_s
    self._origin = time.monotonic() - offset

  def now(self) -> float:
    return time.monotonic() - self._origin
