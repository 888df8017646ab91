"""The working copy in which an island handles one event."""

import operator
from typing import Any

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import island_state as i
from diloco_jax.protocol import messages as m
from diloco_jax.protocol.replacing import replaced


class Turn:
  """A shallow, mutable copy of an IslandState, and the actions so far."""

  def __init__(self, state: i.IslandState, now: float):
    self._state = state
    self.settings = state.settings
    self.limits = state.settings.limits
    self.now = max(now, state.now)
    self.held = list(state.held)
    self._fields: dict[str, Any] = {}
    self.actions: list[a.Action] = []

  def get(self) -> i.IslandState:
    """The scalar fields as changed so far; the fragments live on the Turn."""
    if self._fields:
      self._state = replaced(self._state, self._fields)
      self._fields = {}
    return self._state

  def set(self, **fields: Any) -> None:
    self._fields.update(fields)

  def close(self) -> tuple[i.IslandState, tuple[a.Action, ...]]:
    held = self._state.held
    # What has not changed stays the same object: it need not be checked.
    if len(held) != len(self.held) or not all(
      map(operator.is_, self.held, held)
    ):
      self._fields['held'] = tuple(self.held)
    self._fields['now'] = self.now
    return self.get(), tuple(self.actions)

  def act(self, action: a.Action) -> None:
    self.actions.append(action)

  def note(self, kind: str, **fields: Any) -> None:
    self.actions.append(a.Note(kind=kind, fields=tuple(fields.items())))

  def count(self, what: str) -> None:
    counts = dict(self.get().counts)
    counts[what] = counts.get(what, 0) + 1
    self.set(counts=counts)

  def release(self, handle: int) -> None:
    if handle:
      self.act(a.Release(handle=handle))

  def send(self, message: m.Message, priority: int = 0) -> None:
    peer = self.get().peer
    if peer:
      self.act(a.Send(peer, message, priority))

  def report(self) -> None:
    """Tell the syncer where this island stands."""
    state = self.get()
    if state.phase == i.CALLING or not state.peer:
      return
    complete = all(x.anchor is not None for x in self.held)
    total = sum(self.settings.sizes)
    trained = (state.step_tokens - state.tokens_before) * total
    trained += state.carried
    self.set(seq=state.seq + 1, reported_at=self.now)
    self.send(
      m.Report(
        island=state.island,
        incarnation=state.incarnation,
        seq=state.seq + 1,
        step=state.step,
        tokens=state.step_tokens,
        step_time_s=state.step_time_s,
        versions=tuple(
          x.anchor for x in self.held if complete and x.anchor is not None
        ),
        state=state.state,
        slot=state.waiting_slot,
        captured_slot=state.captured_slot,
        loss=state.loss,
        trained_token_params=trained,
        # Steps in flight may be lost or merged before they are reported.
        pending_token_params=max(0, trained - state.merged - state.lost),
        lost_token_params=state.lost,
        lost_steps=state.lost_steps,
        healthy=state.healthy,
        has_inner_state=state.has_inner_state,
        carried_token_params=state.carried,
      )
    )
    self.set(step_time_s=0.0)

  def decline(self, pull: m.Pull) -> None:
    """There is nothing to give for this pull."""
    state = self.get()
    self.send(
      m.Declined(
        island=state.island,
        incarnation=state.incarnation,
        round=pull.round,
        fragment=pull.fragment,
      )
    )

  def capture(
    self, fragment: int, *, round_id: m.RoundId | None, slot: int, at: float
  ) -> a.CaptureOrder:
    """Note a capture of a fragment at this boundary."""
    state = self.get()
    held = self.held[fragment]
    assert held.capture is None, 'at most one unresolved capture a fragment'
    assert held.anchor is not None and state.boundary > held.step0
    capture = i.Capture(
      id=m.CaptureId(state.incarnation, state.captures + 1),
      round=round_id,
      slot=slot,
      due=state.boundary,
      c_steps=state.boundary - held.step0,
      c_tokens=state.tokens - held.tokens0,
      base=held.anchor,
      pulled_at=at,
    )
    self.set(captures=state.captures + 1)
    self.held[fragment] = held._replace(capture=capture)
    return a.CaptureOrder(fragment=fragment, capture=capture.id)

  def send_capture(self, fragment: int) -> None:
    """Send a contribution, if it is pulled and encoded."""
    state = self.get()
    capture = self.held[fragment].capture
    if capture is None or capture.round is None or not capture.handle:
      return
    if capture.closed:
      return
    self.send(
      m.Contribution(
        island=state.island,
        incarnation=state.incarnation,
        round=capture.round,
        fragment=fragment,
        capture=capture.id,
        base=capture.base,
        c_steps=capture.c_steps,
        c_tokens=capture.c_tokens,
        held_s=max(0.0, self.now - capture.pulled_at),
        encode_s=capture.encode_s,
        fingerprint=self.settings.fingerprint,
        step=capture.due,
        payload=capture.handle,
      )
    )
