"""Batches of windows of text, from a lease, with a saveable position.

Sample i of a run is a window of the text; every epoch is another seeded
permutation of all windows. Lane m of a run owns the samples i with
i % lanes == m, so islands never train on the same sample in one epoch.
"""

from collections.abc import Iterator
import dataclasses
from typing import NamedTuple

from grain import python as grain
import numpy as np

from diloco_jax.errors import Problem
from diloco_jax.errors import UserError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
  """What is read, and how it is cut."""

  path: str = ''  # text, folder or JSONL; '': the standard library's source
  sequence: int = 128  # tokens predicted in a window
  batch: int = 8  # windows a step on each island


class Lease(NamedTuple):
  """Samples begin <= k < end of a lane: k counts within the lane."""

  lane: int
  lanes: int
  begin: int
  end: int  # -1: open ended


class Windows(grain.RandomAccessDataSource):
  """Windows of `sequence + 1` bytes; each overlaps the next by one."""

  def __init__(self, text: np.ndarray, sequence: int):
    self._text = text
    self._sequence = sequence

  def __len__(self) -> int:
    return max(0, (len(self._text) - 1) // self._sequence)

  def __getitem__(self, index: int) -> np.ndarray:
    start = int(index) * self._sequence
    return self._text[start : start + self._sequence + 1]


def _check_size(windows: Windows, needed: int) -> None:
  if len(windows) < needed:
    raise UserError(
      [
        Problem(
          'data.path',
          f'text for {len(windows)} windows',
          f'at least {needed}',
          'use more text, or a smaller data.sequence or data.batch',
        )
      ]
    )


class Samples(Iterator[dict[str, np.ndarray]]):
  """Training batches of one lease: {'tokens': [B, S + 1] int32}."""

  def __init__(
    self,
    text: np.ndarray,
    options: DataOptions,
    lease: Lease,
    seed: int,
  ):
    assert 0 <= lease.lane < lease.lanes, lease
    windows = Windows(text, options.sequence)
    _check_size(windows, options.batch * lease.lanes)
    self._batch = options.batch
    self._lease = lease
    self._dataset = (
      grain.MapDataset.source(windows).seed(seed).shuffle().repeat()
    )
    self.position = lease.begin  # next sample of the lane

  def __next__(self) -> dict[str, np.ndarray]:
    lease = self._lease
    stop = self.position + self._batch
    if 0 <= lease.end < stop:
      raise StopIteration
    rows = [
      self._dataset[k * lease.lanes + lease.lane]
      for k in range(self.position, stop)
    ]
    self.position = stop
    return {'tokens': np.stack(rows).astype(np.int32)}


def in_order(
  text: np.ndarray, options: DataOptions
) -> Iterator[dict[str, np.ndarray]]:
  """Every whole batch of a held-out text, once, in order."""
  windows = Windows(text, options.sequence)
  _check_size(windows, options.batch)
  for start in range(0, len(windows) - options.batch + 1, options.batch):
    rows = [windows[k] for k in range(start, start + options.batch)]
    yield {'tokens': np.stack(rows).astype(np.int32)}
