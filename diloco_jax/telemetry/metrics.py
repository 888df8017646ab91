"""Metrics rows: JSON lines and, where wanted, TensorBoard scalars.

A row is handed to the operating system when it is written, so no row waits
for the next one. What may wait are the steps that an island folds into one
row; a small thread writes that row within a second even if no step follows.
"""

from collections import deque
from collections.abc import Callable
import logging
import math
import os
import pathlib
import threading
import time
from typing import Any

from diloco_jax.telemetry import lines

STEPS_MAX = 10  # steps in a row
AGE_MAX_S = 0.8  # of a row; leaves time to write it within a second
QUEUE_MAX = 64  # rows waiting to be written
TENSORBOARD_FLUSH_S = 5.0  # flushing is an fsync there

# The axes and the identity of a row are no curves of their own.
_NOT_SCALARS = ('t_s', 'step', 'steps', 'global_step', 'incarnation')


class _TensorBoard:
  """Scalars of rows as one event file, written by the calling thread."""

  def __init__(self, folder: str | os.PathLike) -> None:
    # Slow to import, and only some runs want it.
    from tensorboardX import event_file_writer
    from tensorboardX.proto import event_pb2
    from tensorboardX.proto import summary_pb2

    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    self._event = event_pb2.Event
    self._summary = summary_pb2.Summary
    self._writer = event_file_writer.EventsWriter(
      str(path / 'events'), f'.{os.getpid()}'
    )
    self._flushed_at = -math.inf

  def row(self, fields: dict[str, Any]) -> None:
    values = [
      self._summary.Value(tag=name, simple_value=value)
      for name, value in fields.items()
      if name not in _NOT_SCALARS
      and isinstance(value, (int, float))
      and not isinstance(value, bool)
    ]
    if not values:
      return
    step = fields.get('step', fields.get('global_step')) or 0
    self._writer.write_event(
      self._event(
        wall_time=time.time(),
        step=int(step),
        summary=self._summary(value=values),
      )
    )
    now = time.monotonic()
    if now - self._flushed_at >= TENSORBOARD_FLUSH_S:
      self._writer.flush()
      self._flushed_at = now

  def close(self) -> None:
    self._writer.close()


class MetricsWriter:
  """Writes rows. A full disk costs rows, counted, and never the training."""

  def __init__(
    self,
    path_jsonl: str | os.PathLike,
    tensorboard_dir: str | os.PathLike | None = None,
  ) -> None:
    self._path = path_jsonl
    self._file = lines.LineFile(path_jsonl)
    self._tensorboard = (
      _TensorBoard(tensorboard_dir) if tensorboard_dir else None
    )
    self.rows_lost = 0

  def row(self, **fields: Any) -> None:
    """Writes one row; `t_s` is in seconds since the run's start.

    Fields are JSON values or NumPy scalars; NaN and infinity become null.
    """
    assert 't_s' in fields, sorted(fields)
    fields = lines.finite(fields)
    try:
      self._file.append(lines.encode_line(fields))
    except OSError as e:
      self.rows_lost += 1
      if self.rows_lost == 1:
        logging.warning('metrics rows are lost: %s: %s', self._path, e)
    if self._tensorboard is not None:
      try:
        self._tensorboard.row(fields)
      except OSError as e:
        logging.warning('no more TensorBoard scalars: %s: %s', self._path, e)
        self._tensorboard = None

  def close(self) -> None:
    self._file.close()
    if self._tensorboard is not None:
      try:
        self._tensorboard.close()
      except OSError as e:
        logging.warning('TensorBoard scalars are lost: %s: %s', self._path, e)
      self._tensorboard = None


class _Fold:
  """The steps of the next row."""

  __slots__ = (
    'age_s', 'at_s', 'began_s', 'exchange_s', 'loss_sum', 'losses', 'state',
    'step', 'steps', 'time_s', 'tokens',
  )  # fmt: skip

  def __init__(self, began_s: float, state: str) -> None:
    self.began_s = self.at_s = began_s
    self.state = state
    self.steps = self.losses = 0
    self.loss_sum = self.exchange_s = self.time_s = 0.0
    self.step = self.tokens = 0
    self.age_s: float | None = None


class IslandMetrics:
  """Folds an island's steps into rows of up to 10 steps or a second.

  A row has: t_s (when its last step finished), incarnation, step and tokens
  (cumulative), steps and row_tokens (of this row), loss (mean), exchange_s
  (maximum), step_time_s (mean), tokens_per_s, state, anchors_age_s.

  A step that follows a pause longer than a row gets its own row, so that the
  gap can be seen. A row without steps tells of a state, or of a time in which
  the device finished none.
  """

  def __init__(
    self,
    writer: MetricsWriter,
    incarnation: int,
    clock: Callable[[], float],
    *,
    step: int = 0,
    tokens: int = 0,
    background: bool = True,
  ) -> None:
    """Starts the writing thread.

    Args:
      writer: closed together with this object.
      incarnation: of the island.
      clock: seconds since the run's start.
      step: cumulative steps so far, of a restored island.
      tokens: cumulative tokens likewise.
      background: write from a thread. Without it `step` writes full rows and
        `flush` the rest: for virtual time, where no thread may decide what a
        row holds.
    """
    self._writer = writer
    self._incarnation = incarnation
    self._clock = clock
    self._tokens = tokens
    self._step = step
    self._fold: _Fold | None = None
    self._queue: deque[dict[str, Any]] = deque()
    self._changed = threading.Condition()
    self._closing = False
    self._thread: threading.Thread | None = None
    if background:
      self._thread = threading.Thread(
        target=self._run, name='metrics', daemon=True
      )
      self._thread.start()

  def step(
    self,
    step: int,
    tokens: int,
    loss: float | None,
    exchange_s: float,
    step_time_s: float,
    state: str = 'training',
    anchors_age_s: float | None = None,
  ) -> None:
    """What stands after one `island.step`.

    Args:
      step: cumulative inner steps that the device has finished; usually one
        more than before, but it may be none or several.
      tokens: cumulative tokens of those.
      loss: of the last of them, a host number.
      exchange_s: spent in `island.step`, less the wait for the step itself.
      step_time_s: mean of the newly finished steps.
      state: what the island says that it is doing.
      anchors_age_s: since the oldest anchor was received.
    """
    now = self._clock()
    with self._changed:
      fold = self._fold
      rise = step - (self._step if fold is None else fold.step)
      assert rise >= 0, (step, rise)
      if fold is not None and (
        now - fold.began_s >= AGE_MAX_S
        or state != fold.state
        or fold.steps + rise > STEPS_MAX
      ):
        self._finish_row()
      fold = self._fold
      if fold is None:
        fold = self._fold = _Fold(now, state)
        self._changed.notify()
      fold.state = state
      fold.step, fold.tokens = step, tokens
      fold.age_s = anchors_age_s
      if exchange_s > fold.exchange_s:
        fold.exchange_s = exchange_s
      if rise:
        fold.at_s = now
        fold.steps += rise
        fold.time_s += step_time_s * rise
        if loss is not None:
          fold.loss_sum += loss * rise
          fold.losses += rise
      if fold.steps >= STEPS_MAX:
        self._finish_row()
    if self._thread is None:
      self._write_rows()

  def state(self, state: str) -> None:
    """The island does something else than a step: a row without steps."""
    now = self._clock()
    with self._changed:
      if self._fold is not None:
        self._finish_row()
      if self._fold is None:
        self._fold = _Fold(now, state)
        self._fold.step, self._fold.tokens = self._step, self._tokens
        self._finish_row()
    if self._thread is None:
      self._write_rows()

  def flush(self) -> None:
    """Ends the current row."""
    with self._changed:
      if self._fold is not None:
        self._finish_row()
    if self._thread is None:
      self._write_rows()

  def close(self) -> None:
    """Writes what is left and closes the writer."""
    with self._changed:
      if self._closing:
        return
      self._closing = True
      self._changed.notify()
    if self._thread is not None:
      self._thread.join()
    with self._changed:
      while self._fold is not None or self._queue:
        self._write_rows()
        if self._fold is not None:
          self._finish_row()
    self._writer.close()

  def _finish_row(self) -> None:
    """Queues the row. While the queue is full the row takes in more steps."""
    fold = self._fold
    assert fold is not None
    if len(self._queue) >= QUEUE_MAX:
      return
    added = fold.tokens - self._tokens
    self._queue.append(
      {
        't_s': round(fold.at_s, 6),
        'incarnation': self._incarnation,
        'step': fold.step,
        'steps': fold.steps,
        'tokens': fold.tokens,
        'row_tokens': added,
        'loss': fold.loss_sum / fold.losses if fold.losses else None,
        'exchange_s': round(fold.exchange_s, 7),
        'step_time_s': round(fold.time_s / fold.steps, 7)
        if fold.steps
        else None,
        'tokens_per_s': round(added / fold.time_s, 1)
        if fold.time_s > 0
        else None,
        'state': fold.state,
        'anchors_age_s': fold.age_s,
      }
    )
    self._step, self._tokens = fold.step, fold.tokens
    self._fold = None
    self._changed.notify()

  def _write_rows(self) -> None:
    while self._queue:
      self._writer.row(**self._queue.popleft())

  def _run(self) -> None:
    while True:
      with self._changed:
        while not self._queue and not self._closing:
          fold = self._fold
          if fold is None:
            self._changed.wait()
            continue
          left_s = fold.began_s + AGE_MAX_S - self._clock()
          if left_s <= 0:
            self._finish_row()
          else:
            self._changed.wait(left_s)
        if self._closing and not self._queue:
          return
      self._write_rows()
