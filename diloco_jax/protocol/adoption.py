"""Receiving, staging and adopting fragments (section 5.6)."""

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import island_state as i
from diloco_jax.protocol import messages as m
from diloco_jax.protocol.island_turn import Turn
from diloco_jax.protocol.settings import BLEND
from diloco_jax.protocol.settings import EACH
from diloco_jax.protocol.settings import FREE
from diloco_jax.protocol.settings import LOCK_STEP
from diloco_jax.protocol.settings import OVERWRITE
from diloco_jax.protocol.settings import REBASE


def on_broadcast(turn: Turn, message: m.Broadcast) -> None:
  """Keep the newest version of a fragment and have it prepared.

  Monotone: an older one is dropped; a repeat with the same digest is a no-op,
  with another digest it is refused, counted and fetched again.
  """
  if not 0 <= message.fragment < len(turn.held):
    turn.release(message.payload)
    return
  held = turn.held[message.fragment]
  newest, digest = held.anchor, held.digest
  if held.incoming is not None:
    newest, digest = held.incoming.version, held.incoming.digest
  if newest is not None and message.version <= newest:
    if message.version == newest and message.digest != digest:
      _conflict(turn, message)
    turn.release(message.payload)
    return
  if held.incoming is not None:
    turn.release(held.incoming.handle)
  turn.set(
    syncer_incarnation=max(
      turn.get().syncer_incarnation, message.syncer_incarnation
    ),
    global_step=max(turn.get().global_step, message.global_step),
  )
  turn.held[message.fragment] = held._replace(
    incoming=i.Incoming(
      version=message.version,
      round=message.round,
      slot=message.slot,
      digest=message.digest,
      named=message.named,
      handle=message.payload,
    )
  )
  _stage(turn, message.fragment)


def _conflict(turn: Turn, message: m.Broadcast) -> None:
  held = turn.held[message.fragment]
  turn.count('digest_conflict')
  turn.note(
    'digest_conflict', fragment=message.fragment, version=message.version
  )
  if held.incoming is not None:  # forget it: it is re-sent until reported
    turn.release(held.incoming.handle)
    turn.held[message.fragment] = held._replace(incoming=None)


def mode_for(turn: Turn, held: i.Held) -> str:
  """How the received value of a fragment is adopted.

  The first value, all of an evaluator's, and one that is newer than what a
  checkpoint held, overwrite: it may include steps that the checkpoint holds
  as pending. The value that the anchor has already changes nothing.
  """
  incoming = held.incoming
  assert incoming is not None
  state = turn.get()
  if held.anchor is None or state.role == m.EVALUATOR:
    return OVERWRITE
  if state.phase == i.JOINING:
    return REBASE if incoming.digest == held.digest else OVERWRITE
  return turn.settings.adopt


def _kept_capture(held: i.Held, incoming: i.Incoming) -> m.CaptureId | None:
  """The named capture, if it is kept and not overwritten since."""
  capture = held.capture
  if capture is None or capture.detached or capture.id != incoming.named:
    return None
  return capture.id


def _stage(turn: Turn, fragment: int) -> None:
  held = turn.held[fragment]
  incoming = held.incoming
  assert incoming is not None
  capture = _kept_capture(held, incoming)
  mode = mode_for(turn, held)
  turn.held[fragment] = held._replace(
    incoming=incoming._replace(
      staged=False, base=held.anchor, capture=capture, mode=mode
    )
  )
  turn.act(
    a.Stage(
      fragment=fragment,
      version=incoming.version,
      digest=incoming.digest,
      handle=incoming.handle,
      mode=mode,
      base=held.anchor,
      capture=capture,
    )
  )


def on_training(turn: Turn) -> None:
  """What was prepared for joining is prepared again for training."""
  for p, held in enumerate(turn.held):
    if held.incoming is not None and held.incoming.mode != mode_for(turn, held):
      _stage(turn, p)


def on_staged(turn: Turn, event: a.Staged) -> None:
  held = turn.held[event.fragment]
  incoming = held.incoming
  if incoming is None or incoming.version != event.version:
    return
  if not event.ok:
    turn.count('digest_wrong')
    turn.note('digest_wrong', fragment=event.fragment, version=event.version)
    turn.release(incoming.handle)
    turn.held[event.fragment] = held._replace(incoming=None)
    return
  same = (event.base, event.capture, event.mode) == (
    held.anchor, _kept_capture(held, incoming), mode_for(turn, held),
  )  # fmt: skip
  if not same:  # prepared against what is no longer the anchor
    _stage(turn, event.fragment)
    return
  turn.held[event.fragment] = held._replace(
    incoming=incoming._replace(staged=True)
  )
  _maybe_joined(turn)


def _maybe_joined(turn: Turn) -> None:
  """Before training there are no boundaries: adopt as soon as all is there."""
  if turn.get().phase != i.JOINING and turn.get().role != m.EVALUATOR:
    return
  ready = [
    p
    for p, held in enumerate(turn.held)
    if held.incoming is not None and held.incoming.staged
  ]
  if not ready:
    return
  state = turn.get()
  orders = tuple(adopt(turn, p) for p in ready)
  turn.act(a.StepPlan(step=state.boundary, adopt=orders, wait=True))
  turn.report()


def due(turn: Turn) -> list[a.AdoptOrder]:
  """What is adopted at this boundary.

  Free running: whatever is staged. Lock step: a slot's version exactly
  `overlap` steps after its capture; a version of a slot that was not captured
  at once, and the island moves on to the slot after it.
  """
  state = turn.get()
  orders = []
  for p, held in enumerate(turn.held):
    incoming = held.incoming
    if incoming is None or not incoming.staged:
      continue
    if turn.settings.mode != FREE:
      capture = held.capture
      at_end = state.draining or 0 <= state.stop_step <= state.boundary
      if (
        capture is not None
        and capture.slot == incoming.slot
        and state.boundary < capture.due + turn.settings.overlap
        and not at_end
        and not state.lapsed
      ):
        continue
      if incoming.slot >= turn.get().next_slot:
        turn.set(
          next_slot=incoming.slot + 1,
          captured_slot=incoming.slot,
          due=state.boundary + turn.settings.stride,
        )
    orders.append(adopt(turn, p))
  return orders


def adopt(turn: Turn, fragment: int) -> a.AdoptOrder:
  """Make the staged version the anchor, and settle the counters."""
  held = turn.held[fragment]
  incoming = held.incoming
  assert incoming is not None and incoming.staged
  assert held.anchor is None or incoming.version > held.anchor
  state = turn.get()
  mode = incoming.mode
  capture = held.capture
  named = capture if capture and capture.id == incoming.named else None
  if named is not None:
    turn.set(
      merged=state.merged + named.c_tokens * turn.settings.sizes[fragment]
    )
  inside = named if named is not None and not named.detached else None
  if mode == OVERWRITE:
    if state.phase == i.TRAINING:  # else a dead incarnation's books have it
      _lose_rest(turn, fragment, incoming, inside)
    step0, tokens0 = state.boundary, state.tokens
  else:
    assert mode in (REBASE, BLEND), mode
    step0 = held.step0 + (inside.c_steps if inside else 0)
    tokens0 = held.tokens0 + (inside.c_tokens if inside else 0)
  capture = turn.held[fragment].capture
  turn.held[fragment] = turn.held[fragment]._replace(
    anchor=incoming.version,
    digest=incoming.digest,
    step0=step0,
    tokens0=tokens0,
    incoming=None,
  )
  if capture is not None and _resolves(turn, capture, incoming):
    drop_capture(turn, fragment, merged=named is not None)
  elif capture is not None:
    _move_timeline(turn, fragment, held, capture)
  turn.release(incoming.handle)
  return a.AdoptOrder(fragment=fragment, version=incoming.version)


def _resolves(turn: Turn, capture: i.Capture, incoming: i.Incoming) -> bool:
  """Whether a version settles a capture.

  It does if it names it or a later one; otherwise if it was made in the same
  or a later round (lock step: slot). Rounds of one island say nothing of the
  captures of another.
  """
  if incoming.named is not None and incoming.named >= capture.id:
    return True
  if turn.settings.mode == EACH:
    return False
  if turn.settings.mode == LOCK_STEP and incoming.slot >= capture.slot >= 0:
    return True
  if capture.round is None or incoming.round is None:
    return False
  return incoming.round >= capture.round


def _move_timeline(
  turn: Turn, fragment: int, before: i.Held, capture: i.Capture
) -> None:
  """The syncer came back, and did not take this capture in.

  No round of before its restart will. Where it has taken back the value that
  Δ is relative to, Δ still is, under the new version; else nobody can use it,
  and its steps are given later or, if they were overwritten, are lost.
  """
  now = turn.held[fragment]
  assert now.anchor is not None
  if capture.base.incarnation >= now.anchor.incarnation:
    return
  same = capture.base == before.anchor and before.digest == now.digest
  if same and turn.settings.mode != FREE:
    turn.held[fragment] = now._replace(
      capture=capture._replace(base=now.anchor, round=None)
    )
  else:
    drop_capture(turn, fragment)


def _lose_rest(
  turn: Turn,
  fragment: int,
  incoming: i.Incoming,
  inside: i.Capture | None,
) -> None:
  """Overwriting drops the steps in local - anchor but those of the capture.

  An unresolved capture whose round may still merge it keeps its steps: they
  leave the counters with it and are settled when it is.
  """
  state = turn.get()
  held = turn.held[fragment]
  steps = state.boundary - held.step0
  tokens = state.tokens - held.tokens0
  capture = held.capture
  if inside is not None:
    steps -= inside.c_steps
    tokens -= inside.c_tokens
  elif capture is not None and not capture.detached:
    if not _resolves(turn, capture, incoming):
      steps -= capture.c_steps
      tokens -= capture.c_tokens
      turn.held[fragment] = held._replace(
        capture=capture._replace(detached=True)
      )
  assert steps >= 0 and tokens >= 0
  _count_lost(turn, fragment, steps, tokens)


def _count_lost(turn: Turn, fragment: int, steps: int, tokens: int) -> None:
  state = turn.get()
  turn.set(
    lost=state.lost + tokens * turn.settings.sizes[fragment],
    lost_steps=state.lost_steps + steps,
  )


def drop_capture(turn: Turn, fragment: int, *, merged: bool = False) -> None:
  """A capture is settled: forget what was kept of it."""
  held = turn.held[fragment]
  capture = held.capture
  if capture is None:
    return
  if capture.detached and not merged:
    _count_lost(turn, fragment, capture.c_steps, capture.c_tokens)
  turn.release(capture.handle)
  turn.act(a.DropCapture(fragment=fragment, capture=capture.id))
  turn.held[fragment] = held._replace(capture=None)
