"""The tape of one process, written by a thread of its own.

Events and actions are frozen, so they are handed over as they are and turned
into text off the step's path. A durable line is on disk before its callback
runs; lines keep the order in which they were handed over.
"""

from collections.abc import Callable
import pathlib
import queue
import threading
from typing import Any

from diloco_jax.protocol import actions as a
from diloco_jax.runtime.clock import Clock
from diloco_jax.telemetry import machine_lines
from diloco_jax.telemetry import tape

# Lines waiting to be written; whoever adds one beyond waits for the disk.
QUEUE_MAX = 100_000

_Item = tuple[float, str, Any, Callable[[], None] | None]


class Recorder:
  """Records what a machine was fed and what it decided."""

  def __init__(
    self,
    path: pathlib.Path,
    clock: Clock,
    on_failure: Callable[[BaseException], None],
    on_line: Callable[[str, dict[str, Any]], None] | None = None,
  ):
    path.parent.mkdir(parents=True, exist_ok=True)
    self._clock = clock
    self._on_failure = on_failure
    self._on_line = on_line
    self._writer = tape.TapeWriter(path)
    self._now = clock.now()  # of the newest event
    self._queue: queue.Queue[_Item | None] = queue.Queue(QUEUE_MAX)
    self._thread = threading.Thread(target=self._run, name='tape', daemon=True)
    self._thread.start()

  def begin(self, fields: dict[str, Any]) -> float:
    """A machine begins; returns when, by the run's clock."""
    self._now = self._clock.now()
    line = {'now': self._now, **fields}
    self._queue.put((self._now, machine_lines.MACHINE, line, None))
    return self._now

  def append(self, kind: str, fields: dict[str, Any]) -> None:
    """A decision, for people and for the summary."""
    self._queue.put((self._now, kind, fields, None))

  def append_durably(
    self, kind: str, fields: dict[str, Any], then: Callable[[], None]
  ) -> None:
    """Call `then`, on the tape's thread, once the line is on disk."""
    self._queue.put((self._now, kind, fields, then))

  def record(self, event: a.Event, actions: tuple[a.Action, ...]) -> None:
    """A machine's input, and a digest of its output, for replay.

    What it decided follows, at the time of the event.
    """
    self._now = event.now
    self._queue.put((self._now, tape.EVENT, (event, actions), None))

  def close(self) -> None:
    self._queue.put((self._now, machine_lines.CLOSED, {}, None))
    self._queue.put(None)
    self._thread.join(30.0)
    self._writer.close()

  def _run(self) -> None:
    digest = ''
    while (item := self._queue.get()) is not None:
      t_s, kind, fields, then = item
      try:
        if kind == tape.EVENT:
          event, actions = fields
          digest = machine_lines.chained(digest, event, actions)
          fields = machine_lines.event_fields(event, actions, digest)
        elif kind == machine_lines.CLOSED:
          fields = {'digest': digest}
        self._writer.append(kind, fields, t_s, durable=then is not None)
      except OSError as error:
        # Nothing may be promised any more: a merge is not announced before
        # its line is durable.
        self._on_failure(error)
        return
      if self._on_line is not None and kind != tape.EVENT:
        self._on_line(kind, fields)
      if then is not None:
        then()
