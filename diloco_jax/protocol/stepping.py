"""What an island does at a step boundary: the StepPlan (section 4)."""

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import adoption
from diloco_jax.protocol import island_state as i
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import sharing
from diloco_jax.protocol.island_turn import Turn
from diloco_jax.protocol.settings import FREE


def on_boundary(turn: Turn, step: int, tokens: int) -> None:
  state = turn.get()
  assert step >= state.boundary and tokens >= state.tokens
  turn.set(boundary=step, tokens=tokens)
  if state.phase != i.TRAINING:
    turn.act(a.StepPlan(step=step, wait=True))
    return
  if state.finished:
    turn.act(a.StepPlan(step=step, stop=True))
    return
  adopt = tuple(adoption.due(turn))
  capture: tuple[a.CaptureOrder, ...] = ()
  if turn.settings.mode != FREE and not state.draining:
    capture = tuple(_take_slot(turn))
  capture += tuple(_take_pulled(turn))
  slot, wait = -1, False
  if turn.settings.mode != FREE:
    slot = _waits_for(turn)
    wait = slot >= 0 or at_end(turn)
  donate, save = sharing.take_donation(turn), _take_save(turn)
  turn.act(
    a.StepPlan(
      step=step,
      adopt=adopt,
      capture=capture,
      wait=wait,
      donate=donate,
      save=save,
    )
  )
  for order in capture:
    turn.act(a.Encode(fragment=order.fragment, capture=order.capture))
  if turn.settings.mode != FREE:
    _declare(turn, wait, slot, bool(adopt or capture))


# What is captured, and what is waited for.


def at_end(turn: Turn) -> bool:
  """Lock step: no step is made any more; what is left is drained."""
  state = turn.get()
  return state.draining or 0 <= state.stop_step <= state.boundary


def _declare(turn: Turn, wait: bool, slot: int, changed: bool) -> None:
  """Report at once what a slot waits for."""
  state = turn.get()
  new = m.WAITING if wait else m.TRAINING
  changed = changed or state.state != new or state.waiting_slot != slot
  turn.set(state=new, waiting_slot=slot)
  if changed:
    turn.report()


def _take_pulled(turn: Turn) -> list[a.CaptureOrder]:
  """Capture what was pulled, once every received version is adopted."""
  orders = []
  for p, held in enumerate(turn.held):
    if held.pull is None or held.incoming is not None:
      continue
    pull = held.pull
    turn.held[p] = held._replace(pull=None)
    # The pull of a later round says that the last capture was not merged.
    adoption.drop_capture(turn, p)
    if turn.get().boundary == held.step0:
      turn.decline(pull)
      continue
    orders.append(
      turn.capture(p, round_id=pull.round, slot=-1, at=held.pull_at)
    )
  return orders


def _take_slot(turn: Turn) -> list[a.CaptureOrder]:
  """Lock step: capture the next slot's fragment at its own step."""
  state = turn.get()
  if state.boundary != state.due or 0 <= state.stop_step < state.boundary:
    return []
  slot = state.next_slot
  p = slot % len(turn.held)
  earlier = turn.held[p].capture
  given = earlier is not None and earlier.round is not None
  if earlier is not None and given and earlier.slot != slot:
    # It may be in a version that is on its way: the syncer knows.
    turn.held[p] = turn.held[p]._replace(capture=earlier._replace(closed=False))
    return []
  turn.set(
    next_slot=slot + 1,
    captured_slot=slot,
    due=state.due + turn.settings.stride,
  )
  if earlier is not None and given:
    # It is this slot's, from before a lapse: nobody knows whether it is in a
    # version that is on its way, and a repeat of it changes nothing.
    turn.held[p] = turn.held[p]._replace(capture=earlier._replace(closed=False))
    return []
  if turn.held[p].step0 == state.boundary:
    return []
  adoption.drop_capture(turn, p)
  return [turn.capture(p, round_id=None, slot=slot, at=turn.now)]


def _waits_for(turn: Turn) -> int:
  """Lock step: the oldest slot whose version must be adopted by now."""
  state = turn.get()
  if state.draining:
    return -1
  slots = [
    x.capture.slot
    for x in turn.held
    if x.capture is not None
    and x.capture.slot >= 0
    and not x.capture.closed
    and state.boundary >= x.capture.due + turn.settings.overlap
  ]
  return min(slots, default=-1)


def on_refused(turn: Turn, message: m.Refused) -> None:
  turn.count(f'refused_{message.reason}')
  turn.note('refused', fragment=message.fragment, reason=message.reason)
  held = turn.held[message.fragment]
  capture = held.capture
  # A repeat of a contribution is refused too, where the first one came in.
  if message.reason in m.UNJUDGED or capture is None:
    return
  if capture.round == message.round:
    turn.held[message.fragment] = held._replace(
      capture=capture._replace(round=None)
    )


def on_closed(turn: Turn, slot: int) -> None:
  p = slot % len(turn.held)
  capture = turn.held[p].capture
  if capture is not None and capture.slot == slot:
    # No version has it or will: the next slot of this fragment takes its
    # steps. Until then a version that names it all the same would settle it.
    turn.held[p] = turn.held[p]._replace(
      capture=capture._replace(closed=True, round=None)
    )
  if turn.get().waiting_slot == slot:
    turn.set(waiting_slot=-1)


# Checkpoints.


def next_checkpoint(turn: Turn) -> None:
  every = turn.limits.checkpoint_every_s
  if every > 0:
    turn.act(a.SetTimer('checkpoint', turn.now + every))


def _take_save(turn: Turn) -> int:
  """The number of the checkpoint to write at this boundary; 0: none."""
  state = turn.get()
  if not state.save_due or state.saving:
    return 0
  turn.set(save_due=False, saving=True, saves=state.saves + 1)
  return state.saves + 1


def on_checkpoint_saved(turn: Turn, event: a.CheckpointSaved) -> None:
  turn.set(saving=False)
  kind = 'checkpoint' if event.ok else 'checkpoint_failed'
  turn.note(kind, number=event.number)
  next_checkpoint(turn)
