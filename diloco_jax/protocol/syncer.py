"""The syncer's machine: (state, event) -> (state, actions).

The rules are in `membership`, `rounds` and `guard`; this module says which
event goes to which rule, and how a run starts and ends (section 5.8).
"""

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import admission
from diloco_jax.protocol import membership
from diloco_jax.protocol import merging
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import rounds
from diloco_jax.protocol import schedule
from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol.settings import FREE
from diloco_jax.protocol.turn import Turn

State = s.SyncerState
initial = s.initial


def react(state: State, event: a.Event) -> tuple[State, tuple[a.Action, ...]]:
  """One event in; the next state and what is to be done, out."""
  if state.phase == s.FINISHED:
    return state, ()
  turn = Turn(state, event.now)
  match event:
    case a.Received():
      _on_message(turn, event.peer, event.message)
    case a.TimerFired():
      _on_timer(turn, event.name)
    case a.PeerLost():
      membership.on_peer_lost(turn, event.peer)
    case a.Seeded():
      _on_seeded(turn, event)
    case a.Inspected():
      rounds.on_inspected(turn, event)
    case a.Merged():
      merging.on_merged(turn, event)
    case a.TapeWritten():
      _on_tape_written(turn, event.key)
    case a.Exported():
      _on_exported(turn, event.digest)
    case a.StopRequested():
      _interrupt(turn, event.reason)
    case _:
      raise TypeError(f'not an event of the syncer: {event!r}')
  membership.quarantine_offenders(turn)
  _maybe_drain(turn)
  rounds.open_due(turn)
  _maybe_export(turn)
  _maybe_stop(turn)
  return turn.close()


def begin(state: State, now: float) -> tuple[State, tuple[a.Action, ...]]:
  """The first actions of a syncer, before any event."""
  turn = Turn(state, now)
  settings = turn.settings
  turn.note(
    'run_started',
    config_hash=settings.config_hash,
    islands=settings.islands,
    fragments=settings.fragments,
    sizes=settings.sizes,
    period=settings.period,
    stride=settings.stride,
    overlap=settings.overlap,
    steps=settings.steps,
    mode=settings.mode,
    adopt=settings.adopt,
    incarnation=state.incarnation,
  )
  turn.act(a.SetTimer('tick', turn.now + turn.limits.tick_s))
  return turn.close()


def _on_message(turn: Turn, peer: str, message: m.Message) -> None:
  match message:
    case m.Report():
      membership.on_report(turn, peer, message)
      _ask_again(turn, message.island)
    case m.Contribution():
      rounds.on_contribution(turn, message)
    case m.Declined():
      rounds.on_declined(turn, message)
    case m.Hello():
      admission.on_hello(turn, peer, message)
    case m.AskConfig():
      admission.on_ask_config(turn, peer, message)
    case m.Leave():
      membership.on_leave(turn, message)
    case m.Seed():
      _on_seed(turn, message)
    case m.Anchors() | m.AnchorValue() | m.Donation() | m.AskSamples():
      turn.refuse('unasked')  # this syncer never asked for one
      turn.release(getattr(message, 'payload', 0))
    case _:
      raise TypeError(f'not a message to the syncer: {message!r}')


def _ask_again(turn: Turn, island: int) -> None:
  """A report may have made an island eligible for a pull."""
  for rnd in list(turn.rounds.values()):
    if rnd.phase != s.COLLECTING:
      continue
    if any(x.island == island and x.status == s.PENDING for x in rnd.members):
      rounds.ask_members(turn, rnd.id)


def _on_timer(turn: Turn, name: str) -> None:
  if name == 'tick':
    membership.tick(turn)
    for round_id in list(turn.rounds):
      if turn.rounds[round_id].phase == s.COLLECTING:
        rounds.ask_members(turn, round_id)
        rounds.evaluate(turn, round_id)
    for key in sorted(turn.islands):
      island = turn.islands[key]
      if island.sent and island.status in membership.CONNECTED:
        membership.offer_newest(turn, key)
    _warn_of_pace(turn)
    turn.act(a.SetTimer('tick', turn.now + turn.limits.tick_s))
  elif name.startswith('grace:'):
    round_id = m.RoundId(turn.get().incarnation, int(name[6:]))
    rounds.evaluate(turn, round_id)
  else:
    raise ValueError(f'unknown timer {name!r}')


def _warn_of_pace(turn: Turn) -> None:
  """Say once when rounds take too long for the period."""
  state, settings = turn.get(), turn.settings
  step_s = turn.slowest_step_s()
  round_s = state.estimates.round_s
  if settings.mode != FREE or state.warned_pace or not step_s:
    return
  if round_s is None or state.merges < 2 * settings.fragments:
    return
  round_steps = round_s / step_s
  reached = schedule.round_period_steps(
    period=settings.period,
    fragments=settings.fragments,
    overlap=settings.overlap,
    round_steps=round_steps,
  )
  if reached <= 1.1 * settings.period:
    return
  turn.set(warned_pace=True)
  overlap = -int(-settings.fragments * round_steps // settings.period)
  turn.note(
    'pace_warning',
    round_steps=round(round_steps, 2),
    period=settings.period,
    reached=round(reached, 1),
    overlap_that_would_do=overlap,
    stride_that_would_do=-int(-round_steps // max(1, settings.overlap)),
  )


# Start.


def _on_seed(turn: Turn, message: m.Seed) -> None:
  """Θ(0) from the first island, where the syncer has no task."""
  state = turn.get()
  usable = (
    state.phase == s.SEEDING
    and not state.has_task
    and message.fingerprint == turn.settings.fingerprint
    and 0 <= message.fragment < turn.settings.fragments
    and message.fragment not in state.seeds
  )
  if not usable:
    turn.release(message.payload)
    return
  seeds = {**state.seeds, message.fragment: message.payload}
  turn.set(seeds=seeds)
  if len(seeds) == turn.settings.fragments:
    turn.act(a.TakeSeeds(handles=tuple(seeds[p] for p in sorted(seeds))))


def _on_seeded(turn: Turn, event: a.Seeded) -> None:
  assert turn.get().phase == s.SEEDING
  assert len(event.digests) == turn.settings.fragments
  first = m.Version(turn.get().incarnation, 0)
  turn.fragments = [
    s.Fragment(version=first, digest=digest, handle=handle)
    for digest, handle in zip(event.digests, event.handles, strict=True)
  ]
  for handle in turn.get().seeds.values():
    turn.release(handle)
  turn.set(phase=s.OPEN, seeds={})
  for key in sorted(turn.islands):
    if turn.islands[key].status == s.ENTERING:
      membership.welcome(turn, key)


def _on_tape_written(turn: Turn, key: str) -> None:
  kind, incarnation, number = key.split(':')
  assert kind == 'merge', key
  rnd = turn.rounds.get(m.RoundId(int(incarnation), int(number)))
  assert rnd is not None, key
  merging.commit(turn, rnd)


# End.


def _maybe_drain(turn: Turn) -> None:
  """At the last global step or the token budget: ask everyone once more."""
  state, settings = turn.get(), turn.settings
  if state.phase != s.OPEN or not state.started:
    return
  reason = ''
  if state.global_step >= settings.steps:
    reason = 'steps'
  elif 0 <= settings.token_budget <= state.tokens_merged:
    reason = 'token_budget'
  elif settings.mode != FREE:
    live = turn.live()
    if live and all(rounds.at_its_end(turn, x) for x in live):
      reason = 'steps'
  if not reason:
    return
  turn.set(
    phase=s.DRAINING,
    end_reason=reason,
    ends_at=turn.now + turn.limits.drain_timeout_s,
    to_drain=tuple(range(settings.fragments)),
    retries=(),
  )
  turn.note('draining', reason=reason, global_step=turn.get().global_step)


def _interrupt(turn: Turn, reason: str) -> None:
  """Ctrl-C: open rounds are void, Θ is exported as it stands."""
  state = turn.get()
  if state.phase in (s.EXPORTING, s.FINISHED):
    return
  if state.phase == s.SEEDING:
    turn.set(phase=s.FINISHED, end_reason=reason)
    turn.note('finished', reason=reason, global_step=0, merges=0,
              params_digest='')  # fmt: skip
    turn.act(a.Stop(reason=reason))
    return
  for rnd in list(turn.rounds.values()):
    if rnd.phase == s.COLLECTING:
      for member in rnd.members:
        if member.contribution is not None:
          turn.release(member.contribution.payload)
      del turn.rounds[rnd.id]
  turn.set(
    phase=s.DRAINING,
    end_reason=reason,
    ends_at=turn.now + turn.limits.drain_timeout_s,
    to_drain=(),
  )


def _maybe_export(turn: Turn) -> None:
  state = turn.get()
  if state.phase != s.DRAINING or turn.rounds:
    return
  if state.to_drain and turn.live():
    return
  turn.set(phase=s.EXPORTING, to_drain=())
  turn.act(a.Export(global_step=state.global_step))


def _on_exported(turn: Turn, digest: str) -> None:
  state = turn.get()
  assert state.phase == s.EXPORTING
  turn.set(params_digest=digest, ends_at=turn.now + turn.limits.leave_s)
  for key in sorted(turn.islands):
    island = turn.islands[key]
    if island.status != s.LEFT:
      membership.say_finished(turn, island.peer)


def _maybe_stop(turn: Turn) -> None:
  """Finished once everyone has left, or has had time to."""
  state = turn.get()
  if state.phase != s.EXPORTING or not state.params_digest:
    return
  here = [
    x
    for x in turn.islands.values()
    if x.status not in (s.LEFT, s.LAPSED) and (x.peer or not x.is_evaluator)
  ]
  if here and turn.now < state.ends_at:
    return
  for island in (*state.past, *(turn.islands[k] for k in sorted(turn.islands))):
    if not island.is_evaluator:
      membership.note_total(turn, island)
  turn.set(phase=s.FINISHED)
  turn.note(
    'finished',
    reason=state.end_reason,
    global_step=state.global_step,
    merges=state.merges,
    params_digest=state.params_digest,
  )
  turn.act(a.Stop(reason=state.end_reason))
