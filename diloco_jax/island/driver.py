"""Performs an island's actions: arrays and connections.

Encoding and staging run on one worker thread; each ends in an event that is
fed back to the machine. What happens at a step boundary (the StepPlan) is
done by the training thread, in `hook`.
"""

from collections.abc import Callable
import logging
import time
from typing import Any, Protocol

from diloco_jax.island.anchors import Fragments
from diloco_jax.protocol import actions as a
from diloco_jax.protocol import messages as m
from diloco_jax.runtime.clock import Clock
from diloco_jax.runtime.loop import Worker
from diloco_jax.runtime.ports import Handles
from diloco_jax.runtime.ports import outgoing
from diloco_jax.runtime.ports import received
from diloco_jax.transport import base as transport


class Journal(Protocol):
  """The tape, as this driver needs it."""

  def append(self, kind: str, fields: dict[str, Any]) -> None: ...


class NoJournal:
  """For islands without a run folder."""

  def append(self, kind: str, fields: dict[str, Any]) -> None:
    logging.debug('%s %s', kind, fields)


class IslandDriver:
  """The hands of an island's machine."""

  def __init__(
    self,
    *,
    fragments: Fragments,
    endpoint: transport.Endpoint,
    clock: Clock,
    journal: Journal,
    on_plan: Callable[[a.StepPlan], None],
    on_begin: Callable[[m.Start], None],
    on_seeds: Callable[[], list[transport.Payload]],
    on_failure: Callable[[BaseException], None],
  ):
    self._fragments = fragments
    self._endpoint = endpoint
    self._clock = clock
    self._journal = journal
    self._on_plan = on_plan
    self._on_begin = on_begin
    self._on_seeds = on_seeds
    self._handles = Handles()
    self._worker = Worker('exchange', on_failure)
    self.feed: Callable[[a.Event], None] = lambda event: None

  def poll(self, timeout_s: float) -> list[a.Event]:
    events: list[a.Event] = []
    for item in self._endpoint.receive(timeout_s):
      now = self._clock.now()
      if isinstance(item, transport.PeerUp):
        events.append(a.PeerFound(now, item.peer))
      elif isinstance(item, transport.PeerDown):
        events.append(a.PeerLost(now, item.peer, item.reason))
      elif isinstance(item, transport.TokenRefused):
        # Another run listens at the address now: there is no way back.
        raise ConnectionRefusedError('the syncer refuses the token')
      else:
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
      case a.StepPlan():
        self._on_plan(action)
      case a.Send():
        message, payload = outgoing(action, self._handles)
        self._endpoint.send(
          action.peer, message, payload, priority=action.priority
        )
      case a.Encode():
        self._worker.submit(self._encode, action)
      case a.Stage():
        self._worker.submit(
          self._stage, action, self._handles.get(action.handle)
        )
      case a.DropCapture():
        self._worker.submit(self._fragments.forget, action.capture)
      case a.Release():
        self._handles.release(action.handle)
      case a.Note():
        self._journal.append(action.kind, dict(action.fields))
      case a.Begin():
        self._on_begin(action.start)
      case a.GiveSeeds():
        self._worker.submit(self._give_seeds)
      case a.Stop():
        pass
      case _:
        raise TypeError(f'not an action of an island: {action!r}')
    return ()

  def close(self) -> None:
    self._worker.close()

  def _encode(self, action: a.Encode) -> None:
    began = time.monotonic()
    try:
      payload, healthy = self._fragments.delta(action.capture)
    except KeyError:
      return  # dropped before its turn came
    self.feed(
      a.Encoded(
        now=self._clock.now(),
        fragment=action.fragment,
        capture=action.capture,
        handle=self._handles.add(payload),
        encode_s=time.monotonic() - began,
        healthy=healthy,
      )
    )

  def _stage(self, action: a.Stage, payload: transport.Payload) -> None:
    ok = self._fragments.stage(
      action.fragment,
      action.version,
      action.digest,
      action.mode,
      action.capture,
      payload,
    )
    self.feed(
      a.Staged(
        now=self._clock.now(),
        fragment=action.fragment,
        version=action.version,
        base=action.base,
        capture=action.capture,
        mode=action.mode,
        ok=ok,
      )
    )

  def _give_seeds(self) -> None:
    handles = tuple(self._handles.add(x) for x in self._on_seeds())
    self.feed(a.SeedsReady(self._clock.now(), handles))
