"""The island's machine: (state, event) -> (state, actions).

It decides what happens at each step boundary (the StepPlan), what is sent,
and how the counters of trained, merged and lost work change (sections 5.1,
5.2, 5.6 and 5.7). The arrays are the driver's.
"""

from typing import Any

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import adoption
from diloco_jax.protocol import island_state as i
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import sharing
from diloco_jax.protocol import stepping
from diloco_jax.protocol.island_turn import Turn
from diloco_jax.protocol.settings import FREE

State = i.IslandState
initial = i.initial


def react(state: State, event: a.Event) -> tuple[State, tuple[a.Action, ...]]:
  """One event in; the next state and what is to be done, out."""
  if state.phase == i.STOPPED:
    return state, ()
  turn = Turn(state, event.now)
  match event:
    case a.Boundary():
      stepping.on_boundary(turn, event.step, event.tokens)
    case a.StepsFinished():
      _on_steps_finished(turn, event)
    case a.Received():
      _on_message(turn, event.message)
    case a.Encoded():
      _on_encoded(turn, event)
    case a.Staged():
      adoption.on_staged(turn, event)
      if turn.get().role == m.EVALUATOR:
        leave_when_complete(turn)
    case a.SeedsReady():
      _on_seeds_ready(turn, event.handles)
    case a.TimerFired():
      _on_timer(turn, event.name)
    case a.PeerFound():
      _on_peer_found(turn, event.peer)
    case a.PeerLost():
      turn.set(peer='')
      turn.note('syncer_lost', reason=event.reason)
    case a.AnchorReady() | a.Donated() | a.DonationTaken():
      sharing.on_ready(turn, event)
    case a.CheckpointSaved():
      stepping.on_checkpoint_saved(turn, event)
    case a.StateDeclared():
      assert event.state in m.ISLAND_STATES, event.state
      if event.state != turn.get().state:
        turn.set(state=event.state)
        turn.report()
    case a.StopRequested():
      _leave(turn, event.reason)
    case _:
      raise TypeError(f'not an event of an island: {event!r}')
  return turn.close()


# Joining.


def _hello(turn: Turn) -> None:
  state = turn.get()
  settings = turn.settings
  anchors = [x for x in turn.held if x.anchor is not None]
  complete = len(anchors) == len(turn.held)
  turn.send(
    m.Hello(
      protocol_version=m.PROTOCOL_VERSION,
      role=state.role,
      island=state.wanted,
      nonce=state.nonce,
      fingerprint=settings.fingerprint,
      config_hash=settings.config_hash,
      step=state.step,
      tokens=state.step_tokens,
      versions=tuple(
        x.anchor for x in anchors if complete and x.anchor is not None
      ),
      digests=tuple(x.digest for x in anchors if complete),
      has_inner_state=state.has_inner_state,
      seeds_state=state.seeds_state,
      global_step=state.saved_global_step,
      samples_per_step=state.samples_per_step,
    )
  )
  turn.act(a.SetTimer('hello', turn.now + turn.limits.hello_retry_s))


def _on_peer_found(turn: Turn, peer: str) -> None:
  turn.set(peer=peer)
  if turn.get().phase == i.CALLING or turn.get().role == m.EVALUATOR:
    _hello(turn)
  else:
    turn.report()


def _on_timer(turn: Turn, name: str) -> None:
  state = turn.get()
  if name == 'hello':
    if state.phase == i.CALLING and state.peer:
      _hello(turn)
  elif name == 'checkpoint':
    turn.set(save_due=True)
  elif name == 'report':
    if turn.now - state.reported_at >= state.report_every_s:
      turn.report()
    turn.act(a.SetTimer('report', turn.now + state.report_every_s))
  else:
    raise ValueError(f'unknown timer {name!r}')


def _on_welcome(turn: Turn, message: m.Welcome) -> None:
  state = turn.get()
  subscribes = state.role == m.EVALUATOR  # to whichever syncer there is
  if state.phase != i.CALLING and not subscribes:
    return
  assert len(message.versions) in (0, len(turn.held))
  turn.set(
    phase=i.JOINING,
    island=message.island,
    incarnation=message.incarnation,
    syncer_incarnation=message.syncer_incarnation,
    lease_s=message.lease_s,
    report_every_s=message.report_every_s,
  )
  turn.note(
    'welcomed',
    island=message.island,
    incarnation=message.incarnation,
    entry=message.entry,
  )
  if message.seed_wanted:
    turn.act(a.GiveSeeds())
  turn.act(a.SetTimer('report', turn.now + message.report_every_s))
  turn.report()


def _on_seeds_ready(turn: Turn, handles: tuple[int, ...]) -> None:
  state = turn.get()
  assert len(handles) == len(turn.held)
  for p, handle in enumerate(handles):
    turn.send(
      m.Seed(
        island=state.island,
        incarnation=state.incarnation,
        fragment=p,
        fingerprint=turn.settings.fingerprint,
        payload=handle,
      )
    )
    turn.release(handle)


def _on_start(turn: Turn, message: m.Start) -> None:
  """Train from here; in lock step the outstanding captures are void."""
  state = turn.get()
  if message.seq <= state.starts:
    return
  again = state.phase == i.TRAINING
  for p, held in enumerate(turn.held):
    capture = held.capture
    if capture is not None and turn.settings.mode != FREE:
      capture = capture._replace(closed=True)
    turn.held[p] = held._replace(pull=None, capture=capture)
  boundary = state.boundary
  due = message.due_step
  turn.set(
    phase=i.TRAINING,
    starts=message.seq,
    lapsed=False,
    # The first step may be compiled first; it ends this state.
    state=m.COMPILING if state.state == m.RESTORING else state.state,
    global_step=message.global_step,
    next_slot=message.next_slot,
    captured_slot=message.next_slot - 1,
    due=due if due >= 0 else boundary + turn.settings.stride,
    waiting_slot=-1,
    stop_step=message.stop_step,
  )
  if not again:
    # What a checkpoint held as pending, and no newer value has replaced.
    turn.set(
      carried=sum(
        size * (state.tokens - held.tokens0)
        for size, held in zip(turn.settings.sizes, turn.held, strict=True)
      )
    )
    turn.act(a.Begin(start=message))
    adoption.on_training(turn)
    stepping.next_checkpoint(turn)
  turn.note(
    'started',
    again=again,
    global_step=message.global_step,
    next_slot=message.next_slot,
  )


# Messages.


def _on_finished(turn: Turn, message: m.Finished) -> None:
  """Stop at the next boundary, so that the books close on finished steps."""
  turn.set(
    finished=True, final=message.versions, global_step=message.global_step
  )
  if turn.get().role == m.EVALUATOR:
    leave_when_complete(turn)
  elif turn.get().phase != i.TRAINING:
    _leave(turn, 'finished')


def leave_when_complete(turn: Turn) -> None:
  """An evaluator goes once it holds the final value of every fragment."""
  state = turn.get()
  if state.finished and all(
    held.anchor is not None and held.anchor >= final
    for held, final in zip(turn.held, state.final, strict=True)
  ):
    _leave(turn, 'finished')


def _on_message(turn: Turn, message: m.Message) -> None:
  match message:
    case m.Welcome():
      _on_welcome(turn, message)
      return
    case m.Refusal():
      turn.act(a.Stop(reason=f'refused: {message.reason}: {message.detail}'))
      turn.set(phase=i.STOPPED, stop_reason=message.reason)
      return
    case m.Finished():
      _on_finished(turn, message)
      return
    case m.RunConfig():
      return
    case _:
      pass
  if not _is_for_us(turn, message):
    turn.release(getattr(message, 'payload', 0))
    return
  match message:
    case m.Start():
      _on_start(turn, message)
    case m.Broadcast():
      adoption.on_broadcast(turn, message)
    case m.Pull():
      _on_pull(turn, message)
    case m.Refused():
      stepping.on_refused(turn, message)
    case m.Lapsed():
      if turn.get().phase == i.TRAINING and message.seq >= turn.get().starts:
        turn.set(lapsed=True)
    case m.Closed():
      stepping.on_closed(turn, message.slot)
    case m.Superseded():
      turn.note('superseded', incarnation=message.incarnation)
      turn.act(a.Stop(reason='superseded'))
      turn.set(phase=i.STOPPED, stop_reason='superseded')
    case m.AskAnchors():
      sharing.on_ask_anchors(turn, message)
    case m.AskAnchor():
      sharing.on_ask_anchor(turn, message)
    case m.AskDonation():
      sharing.on_ask_donation(turn, message)
    case m.Donation():
      sharing.on_donation(turn, message)
    case _:
      raise TypeError(f'not a message to an island: {message!r}')


def _is_for_us(turn: Turn, message: Any) -> bool:
  """Messages of an old incarnation, theirs or ours, are dropped."""
  state = turn.get()
  if isinstance(message, m.Superseded):
    return bool(
      message.island == state.island and message.incarnation > state.incarnation
    )
  if isinstance(message, m.Donation):  # `island` is the donor
    us = message.recipient, message.recipient_incarnation
    return us == (state.island, state.incarnation)
  island = getattr(message, 'island', state.island)
  if island != state.island or state.phase == i.CALLING:
    return False
  if getattr(message, 'incarnation', None) != state.incarnation:
    return False
  syncer = getattr(message, 'syncer_incarnation', state.syncer_incarnation)
  return bool(syncer >= state.syncer_incarnation)


def _on_pull(turn: Turn, pull: m.Pull) -> None:
  state = turn.get()
  p = pull.fragment
  if not 0 <= p < len(turn.held) or state.phase != i.TRAINING:
    return
  held = turn.held[p]
  if pull.drain:
    turn.set(draining=True)
  if pull.slot >= 0 and turn.settings.mode != FREE:
    _answer_slot(turn, pull)
    return
  capture = held.capture
  if capture is not None and capture.round is not None:
    if pull.round < capture.round:
      return
    if pull.round == capture.round:
      turn.send_capture(p)  # a repeated pull; sent again if it is encoded
      return
  if held.pull is None or held.pull.round < pull.round:
    turn.held[p] = held._replace(pull=pull, pull_at=turn.now)


def _answer_slot(turn: Turn, pull: m.Pull) -> None:
  """Lock step: give the capture that was taken at the slot's own step."""
  p = pull.fragment
  capture = turn.held[p].capture
  state = turn.get()
  given = capture is not None and capture.slot == pull.slot
  if capture is not None and given and not capture.closed:
    if capture.round is None or capture.round < pull.round:
      turn.held[p] = turn.held[p]._replace(
        capture=capture._replace(round=pull.round, pulled_at=turn.now)
      )
    turn.send_capture(p)
  elif pull.slot < state.next_slot or stepping.at_end(turn):
    # An earlier round's pull for this capture is over; nobody merges it.
    if (
      capture is not None
      and capture.round is not None
      and capture.round < pull.round
    ):
      adoption.drop_capture(turn, p)
    turn.decline(pull)


def _leave(turn: Turn, reason: str) -> None:
  state = turn.get()
  if state.phase != i.CALLING:
    # The last report carries the totals that the books are closed with.
    turn.report()
    turn.send(
      m.Leave(island=state.island, incarnation=state.incarnation, reason=reason)
    )
  turn.set(phase=i.STOPPED, stop_reason=reason)
  turn.act(a.Stop(reason=reason))


# Steps.


def _on_steps_finished(turn: Turn, event: a.StepsFinished) -> None:
  state = turn.get()
  assert event.step >= state.step and event.tokens >= state.step_tokens
  turn.set(
    step=event.step,
    step_tokens=event.tokens,
    step_time_s=event.step_time_s,
    loss=event.loss,
  )
  if state.state != m.WAITING:
    turn.set(state=m.TRAINING)
  turn.set(has_inner_state=True)
  turn.report()


def _on_encoded(turn: Turn, event: a.Encoded) -> None:
  capture = turn.held[event.fragment].capture
  if capture is None or capture.id != event.capture:
    turn.release(event.handle)
    return
  turn.set(healthy=event.healthy)
  turn.held[event.fragment] = turn.held[event.fragment]._replace(
    capture=capture._replace(handle=event.handle, encode_s=event.encode_s)
  )
  turn.send_capture(event.fragment)
