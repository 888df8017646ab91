"""The tape of one process, written by a thread of its own.

Events and actions are frozen, so they are handed over as they are and turned
into text off the step's path. A durable line is on disk before its callback
runs; lines keep the order in which they were handed over.
"""

from collections.abc import Callable
import json
import pathlib
import queue
import threading
from typing import Any

import xxhash

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import records
from diloco_jax.runtime.clock import Clock
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
    self._queue: queue.Queue[_Item | None] = queue.Queue(QUEUE_MAX)
    self._thread = threading.Thread(target=self._run, name='tape', daemon=True)
    self._thread.start()

  def append(self, kind: str, fields: dict[str, Any]) -> None:
    """A decision, for people and for the summary."""
    self._queue.put((self._clock.now(), kind, fields, None))

  def append_durably(
    self, kind: str, fields: dict[str, Any], then: Callable[[], None]
  ) -> None:
    """Call `then`, on the tape's thread, once the line is on disk."""
    self._queue.put((self._clock.now(), kind, fields, then))

  def record(self, event: a.Event, actions: tuple[a.Action, ...]) -> None:
    """A machine's input, and a digest of its output, for replay."""
    item = (self._clock.now(), tape.EVENT, (event, actions), None)
    self._queue.put(item)

  def close(self) -> None:
    self._queue.put(None)
    self._thread.join(30.0)
    self._writer.close()

  def _run(self) -> None:
    while (item := self._queue.get()) is not None:
      t_s, kind, fields, then = item
      try:
        if kind == tape.EVENT:
          fields = _event_fields(*fields)
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


def _event_fields(
  event: a.Event, actions: tuple[a.Action, ...]
) -> dict[str, Any]:
  return {
    'event': records.to_plain(event),
    'actions': [type(x).__name__ for x in actions],
    'digest': actions_digest(actions),
  }


def actions_digest(actions: tuple[a.Action, ...]) -> str:
  """Of everything that a machine decided on one event."""
  text = json.dumps(records.to_plain(actions), separators=(',', ':'))
  return xxhash.xxh64_hexdigest(text.encode())
