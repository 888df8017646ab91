"""Simulated disks: what is durable, what is torn, what had no room."""

import dataclasses
import json
import random
from typing import Any

from diloco_jax.protocol import records
from diloco_jax.simulation.compute import noisy


@dataclasses.dataclass(frozen=True)
class DiskSettings:
  """Seconds of virtual time."""

  tape_s: float = 0.002  # until a line is durable
  snapshot_s: float = 0.2
  checkpoint_s: float = 0.2
  cv: float = 0.0


class Disk:
  """One machine's disk; it survives the processes that write to it."""

  def __init__(self, settings: DiskSettings, rng: random.Random):
    self._settings = settings
    self._rng = rng
    self.full_until = 0.0
    self._slow, self._slow_until = 1.0, 0.0

  def slow(self, factor: float, until: float) -> None:
    self._slow, self._slow_until = factor, until

  def is_full(self, now: float) -> bool:
    return now < self.full_until

  def takes_s(self, mean: float, now: float) -> float:
    took = noisy(self._rng, mean, self._settings.cv)
    return took * self._slow if now < self._slow_until else took


class TapeFile:
  """The syncer's tape: lines in order, of which the first are durable."""

  def __init__(self) -> None:
    self.lines: list[dict[str, Any]] = []
    self.durable = 0

  def append(self, t_s: float, kind: str, fields: Any) -> int:
    """Write a line; returns how many are durable once this one is."""
    self.lines.append({'t_s': t_s, 'kind': kind, **dict(fields)})
    return len(self.lines)

  def sync(self, count: int) -> None:
    """A file's earlier lines are durable when a later one is."""
    self.durable = max(self.durable, count)

  def crash(self, keep: int) -> None:
    """The writer died; so many lines beyond the durable ones are there."""
    del self.lines[self.durable + keep :]
    self.durable = len(self.lines)

  def read(self) -> list[dict[str, Any]]:
    """The lines as they come back from a file."""
    result: list[dict[str, Any]] = []
    for line in self.lines:
      result.append(json.loads(records.to_json(line)))
    return result


class Checkpoints:
  """The committed checkpoints of one island, oldest first."""

  KEEP = 2

  def __init__(self) -> None:
    self._saved: list[Any] = []

  def commit(self, saved: Any) -> None:
    self._saved = [*self._saved, saved][-self.KEEP :]

  def remove_all(self) -> None:
    self._saved = []

  @property
  def newest(self) -> Any | None:
    return self._saved[-1] if self._saved else None
