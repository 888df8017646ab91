"""Batches of windows of text, from a lease, with a saveable position.

Shapes in names: B windows in a batch, S tokens predicted in a window.

Sample i of a run is a window of the text; every epoch is another seeded
permutation of all windows. Lane m of a run owns the samples i with
i % lanes == m, so islands never train on the same sample in one epoch.
"""

from collections.abc import Iterator
import dataclasses
import math
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
  """Training batches of one lease: {'tokens': [B, S + 1] int32}.

  `position` is the next sample of the lane: a lease that begins there, or
  setting it, goes on with the same batches.
  """

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


SUBSET_TOKENS = 65_536  # of a quick look at the held-out text


def held_out(
  text: np.ndarray, options: DataOptions, tokens: int = -1
) -> Iterator[dict[str, np.ndarray]]:
  """Batches of held-out text: each byte but the first is predicted once.

  The order is fixed and spreads over the text, so that any first batches are
  a fair sample of it; it depends on neither seed nor batch size.

  Args:
    text: [bytes] uint8.
    options: window and batch.
    tokens: stop when this many are predicted, rounded up to whole windows;
      SUBSET_TOKENS for a quick look; -1: all of them.

  Yields:
    {'tokens': [B, S + 1] int32, 'mask': [B, S] bool}. Every batch has the
    same shape; what only fills up the end of the text, or the last batch, is
    masked.

  Raises:
    UserError: no byte to predict.
  """
  sequence, batch = options.sequence, options.batch
  predicted = len(text) - 1
  if predicted < 1:
    _check_size(Windows(text, sequence), 1)
  windows = -(-predicted // sequence)
  wanted = windows if tokens < 0 else min(windows, -(-tokens // sequence))
  stride = _spreading_stride(windows)
  for first in range(0, wanted, batch):
    tokens_BxS1 = np.zeros((batch, sequence + 1), np.int32)
    mask_BxS = np.zeros((batch, sequence), bool)
    for row, k in enumerate(range(first, min(first + batch, wanted))):
      start = k * stride % windows * sequence
      piece = text[start : start + sequence + 1]
      tokens_BxS1[row, : len(piece)] = piece
      mask_BxS[row, : len(piece) - 1] = True
    yield {'tokens': tokens_BxS1, 'mask': mask_BxS}


def _spreading_stride(count: int) -> int:
  """A step that visits each of `count` places once, evenly from the start.

  The golden section's multiples fill a circle most evenly; a neighbour of it
  that has no divisor in common with `count` comes back only at the end.
  """
  stride = max(1, round(count * (5**0.5 - 1) / 2))
  while math.gcd(stride, count) != 1:
    stride += 1
  return stride
