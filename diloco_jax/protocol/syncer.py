"""The syncer's machine: (state, event) -> (state, actions).

The rules are in `membership`, `rounds` and `guard`; this module says which
event goes to which rule, and how a run starts and ends (section 5.8).
"""

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import admission
from diloco_jax.protocol import donors
from diloco_jax.protocol import ending
from diloco_jax.protocol import membership
from diloco_jax.protocol import merging
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import recovering
from diloco_jax.protocol import reopening
from diloco_jax.protocol import rounds
from diloco_jax.protocol import schedule
from diloco_jax.protocol import standstill
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
  away_s = turn.now - state.now
  if away_s > turn.limits.standstill_s:  # it ticks more often than that
    standstill.make_good(turn, away_s)
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
      ending.on_exported(turn, event.digest)
    case a.AnchorTaken():
      recovering.on_anchor_taken(turn, event)
    case a.Restored():
      reopening.on_restored(turn, event)
    case a.SnapshotSaved():
      _on_snapshot_saved(turn, event)
    case a.StopRequested():
      ending.interrupt(turn, event.reason)
    case _:
      raise TypeError(f'not an event of the syncer: {event!r}')
  if turn.get().phase == s.RECOVERING:
    recovering.proceed(turn)
    return turn.close()
  membership.quarantine_offenders(turn)
  ending.maybe_drain(turn)
  rounds.open_due(turn)
  ending.maybe_export(turn)
  ending.maybe_stop(turn)
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
  if state.phase == s.RECOVERING:
    recovering.begin(turn)
  elif state.recovering is not None:
    recovering.remember(turn)
    turn.set(recovering=None)
    ending.say_goodbye(turn)
  turn.act(a.SetTimer('tick', turn.now + turn.limits.tick_s))
  return turn.close()


def _on_message(turn: Turn, peer: str, message: m.Message) -> None:
  match message:
    case m.Hello():
      admission.on_hello(turn, peer, message)
    case m.AskConfig():
      admission.on_ask_config(turn, peer, message)
    case m.Leave():
      membership.on_leave(turn, message)
    case _ if turn.get().phase == s.RECOVERING:
      recovering.on_message(turn, peer, message)
    case m.Report():
      membership.on_report(turn, peer, message)
      _ask_again(turn, message.island)
    case m.Contribution():
      rounds.on_contribution(turn, message)
    case m.Declined():
      rounds.on_declined(turn, message)
    case m.Seed():
      _on_seed(turn, message)
    case m.Donation():
      donors.on_donation(turn, message)
    case m.Anchors() | m.AnchorValue():  # the recovery is over
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
    if turn.get().phase == s.RECOVERING:
      recovering.ask_all(turn)
    else:
      _tick(turn)
    turn.act(a.SetTimer('tick', turn.now + turn.limits.tick_s))
  elif name.startswith('grace:'):
    round_id = m.RoundId(turn.get().incarnation, int(name[6:]))
    rounds.evaluate(turn, round_id)
  else:
    raise ValueError(f'unknown timer {name!r}')


def _tick(turn: Turn) -> None:
  membership.tick(turn)
  _maybe_snapshot(turn)
  for round_id in list(turn.rounds):
    if turn.rounds[round_id].phase == s.COLLECTING:
      rounds.ask_members(turn, round_id)
      rounds.evaluate(turn, round_id)
  for key in sorted(turn.islands):
    island = turn.islands[key]
    if island.sent and island.status in membership.CONNECTED:
      membership.offer_newest(turn, key)
  _warn_of_pace(turn)


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
  turn.set(seeds={})
  turn.act(
    a.WriteTape(
      key=f'seeded:{first.incarnation}',
      fields=(('incarnation', first.incarnation), ('digests', event.digests)),
    )
  )


def _open(turn: Turn) -> None:
  """Θ is there and durable: islands may come."""
  turn.set(phase=s.OPEN)
  for key in sorted(turn.islands):
    island = turn.islands[key]
    if island.status == s.ENTERING and island.admitted:
      membership.welcome(turn, key)
  _maybe_snapshot(turn)


def _on_tape_written(turn: Turn, key: str) -> None:
  kind, first, *rest = key.split(':')
  match kind:
    case 'merge':
      rnd = turn.rounds.get(m.RoundId(int(first), int(rest[0])))
      assert rnd is not None, key
      merging.commit(turn, rnd)
    case 'admitted':
      admission.on_admitted(turn, int(first), int(rest[0]))
    case 'seeded':
      _open(turn)
    case 'exported':
      ending.say_goodbye(turn)
    case 'recovering':
      recovering.on_durable(turn)
    case 'recovered':
      reopening.reopen(turn)
      for index in sorted(turn.islands):
        island = turn.islands[index]
        if island.status in membership.CONNECTED and island.admitted:
          membership.offer_newest(turn, index)
      membership.start_ready(turn)
    case _:
      raise ValueError(f'unknown line {key!r}')


# Snapshots.


def _maybe_snapshot(turn: Turn) -> None:
  """Now and then, where something was merged since the last one."""
  state, limits = turn.get(), turn.limits
  every = limits.snapshot_every_s
  if state.phase != s.OPEN or state.snapshot_saving or every <= 0:
    return
  due = turn.now - state.snapshot_at >= every
  if not due or state.merges <= state.snapshot_merges:
    return
  number = state.snapshots + 1
  turn.set(
    snapshots=number,
    snapshot_at=turn.now,
    snapshot_merges=state.merges,
    snapshot_saving=True,
  )
  versions = tuple(x.version for x in turn.fragments)
  turn.act(a.SaveSnapshot(number=number, versions=versions))


def _on_snapshot_saved(turn: Turn, event: a.SnapshotSaved) -> None:
  """Recovery need not look further back than to a snapshot that is there."""
  turn.set(snapshot_saving=False)
  if event.ok:
    turn.note('snapshot', number=event.number, versions=event.versions)
  else:
    turn.note('snapshot_failed', number=event.number)
