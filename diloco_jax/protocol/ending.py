"""How a run ends: drain, export, goodbye (section 5.8)."""

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import membership
from diloco_jax.protocol import rounds
from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol.settings import FREE
from diloco_jax.protocol.turn import Turn


def maybe_drain(turn: Turn) -> None:
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


def interrupt(turn: Turn, reason: str) -> None:
  """Ctrl-C: open rounds are void, Θ is exported as it stands."""
  state = turn.get()
  if state.phase in (s.EXPORTING, s.FINISHED):
    return
  if state.phase in (s.SEEDING, s.RECOVERING):
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


def maybe_export(turn: Turn) -> None:
  state = turn.get()
  if state.phase != s.DRAINING or turn.rounds:
    return
  if state.to_drain and turn.live():
    return
  turn.set(phase=s.EXPORTING, to_drain=())
  turn.act(a.Export(global_step=state.global_step))


def on_exported(turn: Turn, digest: str) -> None:
  """A syncer that comes back from here on finds the run at its end."""
  state = turn.get()
  assert state.phase == s.EXPORTING
  turn.set(exported=digest)
  turn.act(
    a.WriteTape(
      key=f'exported:{state.incarnation}',
      fields=(
        ('params_digest', digest),
        ('reason', state.end_reason),
        ('global_step', state.global_step),
      ),
    )
  )


def say_goodbye(turn: Turn) -> None:
  """Θ is on disk and the tape says so: islands may hear of it."""
  turn.set(
    params_digest=turn.get().exported,
    ends_at=turn.now + turn.limits.leave_s,
  )
  for key in sorted(turn.islands):
    island = turn.islands[key]
    if island.status != s.LEFT:
      membership.say_finished(turn, island.peer)


def maybe_stop(turn: Turn) -> None:
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
