"""Performs the syncer's actions: arrays, disk and connections.

Looking at contributions, merging and exporting run on one worker thread, in
the order asked for; a tape line is written by the tape's own thread. Each
ends in an event that is posted back to the loop.
"""

from collections.abc import Callable
import time
from typing import Any, Protocol

from diloco_jax.protocol import actions as a
from diloco_jax.runtime.clock import Clock
from diloco_jax.runtime.loop import Worker
from diloco_jax.runtime.ports import Handles
from diloco_jax.runtime.ports import outgoing
from diloco_jax.runtime.ports import received
from diloco_jax.storage import payloads
from diloco_jax.syncer.store import Store
from diloco_jax.transport import base as transport


class Journal(Protocol):
  """The tape, as this driver needs it."""

  def append(self, kind: str, fields: dict[str, Any]) -> None: ...

  def append_durably(
    self, kind: str, fields: dict[str, Any], then: Callable[[], None]
  ) -> None:
    """Call `then` once the line is on disk."""
    ...


class SyncerDriver:
  """The hands of the syncer's machine."""

  def __init__(
    self,
    *,
    store: Store,
    endpoint: transport.Endpoint,
    journal: Journal,
    clock: Clock,
    export: Callable[[Store, int], str],
    on_failure: Callable[[BaseException], None],
    keep: Callable[[str, list[Any]], None] | None = None,
  ):
    """Starts the worker.

    Args:
      store: of Θ; from here on the worker's.
      endpoint: to islands and evaluators.
      journal: the tape.
      clock: of the run.
      export: writes the final parameters, returns their digest.
      on_failure: told what ended the worker.
      keep: told the arrays of Θ(0) and of every merge, under a name.
    """
    self._keep = keep
    self._store = store
    self._endpoint = endpoint
    self._journal = journal
    self._clock = clock
    self._export = export
    self._handles = Handles()
    self._worker = Worker('merge', on_failure)
    self.post: Callable[[a.Event], None] = lambda event: None
    self.refused_sends = 0

  # What the loop calls.

  def poll(self, timeout_s: float) -> list[a.Event]:
    events: list[a.Event] = []
    for item in self._endpoint.receive(timeout_s):
      now = self._clock.now()
      if isinstance(item, transport.PeerDown):
        events.append(a.PeerLost(now, item.peer, item.reason))
      elif isinstance(item, transport.Delivery):
        event = received(
          now, item.peer, item.message, item.payload, self._handles
        )
        if event is not None:
          events.append(event)
    return events

  def wake(self) -> None:
    self._endpoint.wake()

  def perform(self, action: a.Action) -> tuple[a.Event, ...]:
    match action:
      case a.Send():
        self._send(action)
      case a.Release():
        self._handles.release(action.handle)
      case a.Note():
        self._journal.append(action.kind, dict(action.fields))
      case a.WriteTape():
        self._write(action)
      case a.Inspect():
        self._worker.submit(
          self._inspect, action, self._handles.get(action.handle)
        )
      case a.Merge():
        deltas = [self._handles.get(x.handle) for x in action.inputs]
        self._worker.submit(self._merge, action, deltas)
      case a.TakeSeeds():
        payloads = [self._handles.get(x) for x in action.handles]
        self._worker.submit(self._take_seeds, payloads)
      case a.Export():
        self._worker.submit(self._export_now, action.global_step)
      case a.Stop():
        pass
      case _:
        raise TypeError(f'not an action of the syncer: {action!r}')
    return ()

  def close(self) -> None:
    self._worker.close()

  # What it does.

  def seed(self, make: Callable[[], list[dict[str, Any]]], warm: int) -> None:
    """Start making Θ(0); ends in Seeded."""

    def work() -> None:
      self._store.seed(make())
      self._store.warm_up(warm)
      self._post_seeded()

    self._worker.submit(work)

  def _post_seeded(self) -> None:
    if self._keep is not None:
      self._keep(payloads.START, [x for x, _ in self._store.copies()])
    digests, handles = [], []
    for p in range(len(self._store.partition.sizes)):
      payload, digest = self._encoded(p, self._store.digest(p))
      digests.append(digest)
      handles.append(self._handles.add(payload))
    self.post(a.Seeded(self._clock.now(), tuple(digests), tuple(handles)))

  def _encoded(
    self, fragment: int, digest_f32: str
  ) -> tuple[transport.Payload, str]:
    buffers, digest = self._store.encode(fragment)
    payload = transport.Payload(kind=self._store.download, buffers=buffers)
    return payload, digest or digest_f32

  def _take_seeds(self, payloads: list[transport.Payload]) -> None:
    self._store.seed(
      [self._store.decode(p, x, 'f32') for p, x in enumerate(payloads)]
    )
    self._post_seeded()

  def _send(self, action: a.Send) -> None:
    message, payload = outgoing(action, self._handles)
    sent = self._endpoint.send(
      action.peer, message, payload, priority=action.priority
    )
    if not sent:  # at a bound, or the peer is gone; the protocol repeats it
      self.refused_sends += 1

  def _write(self, action: a.WriteTape) -> None:
    kind = action.key.split(':')[0]
    self._journal.append_durably(
      kind,
      dict(action.fields),
      lambda: self.post(a.TapeWritten(self._clock.now(), action.key)),
    )

  def _inspect(self, action: a.Inspect, payload: transport.Payload) -> None:
    reason, norm = '', 0.0
    try:
      delta = self._store.decode(action.fragment, payload, self._store.upload)
    except ValueError:
      reason = 'shape'
    else:
      finite, norm = self._store.look(delta)
      if finite:
        self._handles.replace(action.handle, delta)
      else:
        reason, norm = 'nonfinite', 0.0
    self.post(
      a.Inspected(
        now=self._clock.now(),
        round=action.round,
        island=action.island,
        incarnation=action.incarnation,
        reason=reason,
        norm=norm,
      )
    )

  def _merge(self, action: a.Merge, deltas: list[Any]) -> None:
    if self._keep is not None:
      self._keep(payloads.of_merge(*action.round), deltas)
    began = time.monotonic()
    weights = [x.weight for x in action.inputs]
    self._store.merge(action.fragment, deltas, weights)
    digest_f32 = self._store.digest(action.fragment)
    payload, digest = self._encoded(action.fragment, digest_f32)
    self.post(
      a.Merged(
        now=self._clock.now(),
        round=action.round,
        digest_f32=digest_f32,
        digest=digest,
        handle=self._handles.add(payload),
        merge_s=time.monotonic() - began,
      )
    )

  def _export_now(self, global_step: int) -> None:
    digest = self._export(self._store, global_step)
    self.post(a.Exported(self._clock.now(), digest))
