"""Who may join, and as whom (sections 5.7, 5.12 and 5.14 of the design)."""

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import donors
from diloco_jax.protocol import ledger
from diloco_jax.protocol import membership
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import recovering
from diloco_jax.protocol import rounds
from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol.turn import Turn


def on_ask_config(turn: Turn, peer: str, message: m.AskConfig) -> None:
  if message.protocol_version != m.PROTOCOL_VERSION:
    _refuse_hello(turn, peer, *_version_problem(message.protocol_version))
    return
  state = turn.get()
  turn.send(
    peer,
    m.RunConfig(
      config_json=state.config_json, config_hash=turn.settings.config_hash
    ),
  )


def _version_problem(got: int) -> tuple[str, str]:
  return (
    'protocol_version',
    f'protocol version {got}, the syncer speaks {m.PROTOCOL_VERSION}',
  )


def _refuse_hello(turn: Turn, peer: str, reason: str, detail: str) -> None:
  turn.refuse(reason)
  turn.note('hello_refused', peer=peer, reason=reason, detail=detail)
  turn.send(peer, m.Refusal(reason=reason, detail=detail))


def _problem(turn: Turn, hello: m.Hello) -> tuple[str, str] | None:
  """Why this hello cannot be admitted, or None."""
  settings = turn.settings
  if hello.protocol_version != m.PROTOCOL_VERSION:
    return _version_problem(hello.protocol_version)
  if hello.role not in m.ROLES:
    return 'role', f'role {hello.role[:40]!r}, expected one of {m.ROLES}'
  if hello.config_hash != settings.config_hash:
    return (
      'config_hash',
      (
        f'configuration {hello.config_hash[:16]!r}, the run has '
        f'{settings.config_hash[:16]!r}'
      ),
    )
  if hello.fingerprint != settings.fingerprint:
    return (
      'layout',
      (
        f'layout fingerprint {hello.fingerprint[:16]!r}, the run has '
        f'{settings.fingerprint[:16]!r}: model, dtypes or fragments differ'
      ),
    )
  phase = turn.get().phase
  if phase in (s.DRAINING, s.EXPORTING, s.FINISHED) and hello.role == m.ISLAND:
    return 'finished', 'the run is at its end'
  limit = max(settings.islands_max, settings.islands)
  count = settings.fragments
  if len(hello.versions) not in (0, count) or len(hello.digests) != len(
    hello.versions
  ):
    return (
      'versions',
      (
        f'{len(hello.versions)} versions and {len(hello.digests)} digests of '
        f'{count} fragments'
      ),
    )
  if hello.role == m.ISLAND and hello.island >= limit:
    return 'index', f'island index {hello.island}, expected below {limit}'
  return None


def _index(turn: Turn, hello: m.Hello) -> int | None:
  """The index that a newcomer gets; None when there is no room."""
  if hello.role == m.EVALUATOR:
    for index in range(-1, -1 - turn.limits.evaluators_max, -1):
      known = turn.islands.get(index)
      if known is None or not known.peer:
        return index
    return None
  if hello.island >= 0:
    return hello.island
  limit = max(turn.settings.islands_max, turn.settings.islands)
  for index in range(limit):
    known = turn.islands.get(index)
    if known is None or known.status in (s.LAPSED, s.LEFT):
      return index
  return None


def on_hello(turn: Turn, peer: str, hello: m.Hello) -> None:
  if _is_known(turn, peer, hello.nonce):
    return
  problem = _problem(turn, hello)
  if problem is not None:
    _refuse_hello(turn, peer, *problem)
    return
  index = _index(turn, hello)
  if index is None:
    _refuse_hello(turn, peer, 'full', 'every place in this run is taken')
    return
  incarnations = dict(turn.get().incarnations)
  incarnation = incarnations.get(index, 0) + 1
  incarnations[index] = incarnation
  turn.set(incarnations=incarnations)
  old = turn.islands.get(index)
  if old is not None:
    _end_incarnation(turn, old)
    if old.peer and old.peer != peer:
      turn.send(old.peer, m.Superseded(island=index, incarnation=incarnation))
  turn.islands[index] = s.Island(
    id=index,
    incarnation=incarnation,
    nonce=hello.nonce,
    peer=peer,
    status=s.ENTERING,
    entry=_entry(turn, hello),
    since=turn.now,
    lease_until=turn.now + turn.limits.restoring_s,
    state_since=turn.now,
    step=hello.step,
    tokens=hello.tokens,
    versions=hello.versions,
    admitted=False,
    begin=ledger.next_begin(turn, old) if old is not None else 0,
    first_step=hello.step,
    samples_per_step=hello.samples_per_step,
    has_inner_state=hello.has_inner_state,
    seeds_state=hello.seeds_state,
  )
  # The old incarnation's work leaves the open rounds before the new one is
  # told anything, so that no round can hold two incarnations of one island.
  if old is not None:
    rounds.drop_from_open(turn, index, old.incarnation, 'restarted')
    if turn.get().phase == s.RECOVERING:
      recovering.forget(turn, index)
  if index < 0:  # an evaluator's incarnation enters no books
    on_admitted(turn, index, incarnation)
  else:
    _write_down(turn, turn.islands[index])


def _entry(turn: Turn, hello: m.Hello) -> str:
  """How a newcomer gets its state (5.10)."""
  state, limits = turn.get(), turn.limits
  if state.global_step == 0:
    return m.FRESH
  age = state.global_step - hello.global_step
  young = age <= limits.checkpoint_age_periods * turn.settings.period
  if hello.has_inner_state and young:
    return m.OWN_CHECKPOINT
  able = limits.donors_max > 0 and bool(donors.candidates(turn))
  if hello.role == m.ISLAND and able:
    return m.PEER_STATE
  return m.PARAMETERS_ONLY


def _write_down(turn: Turn, island: s.Island) -> None:
  """An incarnation is durable before the island hears of it."""
  turn.act(
    a.WriteTape(
      key=f'admitted:{island.id}:{island.incarnation}',
      fields=(
        ('island', island.id),
        ('incarnation', island.incarnation),
        ('nonce', island.nonce),
        ('entry', island.entry),
        ('begin', island.begin),
        ('first_step', island.first_step),
        ('samples_per_step', island.samples_per_step),
      ),
    )
  )


def on_admitted(turn: Turn, index: int, incarnation: int) -> None:
  """Now it may be told who it is."""
  if turn.islands[index].incarnation != incarnation:
    return
  island = turn.island(index, admitted=True)
  state = turn.get()
  if state.phase == s.RECOVERING:
    if not island.is_evaluator:
      membership.welcome(turn, index)
      recovering.ask(turn, index)
  elif state.phase != s.SEEDING:
    membership.welcome(turn, index)
  elif island.seeds_state and not state.has_task:
    seeder = (
      turn.islands.get(state.seeder) if state.seeder is not None else None
    )
    if seeder is None or seeder.status != s.ENTERING or seeder.id == index:
      turn.set(seeder=index)
      membership.welcome(turn, index, seed_wanted=True)


def _is_known(turn: Turn, peer: str, nonce: str) -> bool:
  """Whether this process has said hello before; then answer it again."""
  for known in turn.islands.values():
    if known.nonce != nonce:
      continue
    if known.status == s.LEFT:
      return True
    if known.status == s.LAPSED:  # it took too long to come in
      turn.island(
        known.id,
        status=s.ENTERING,
        since=turn.now,
        lease_until=turn.now + turn.limits.restoring_s,
      )
    turn.island(known.id, peer=peer, sent={})
    if known.admitted:  # else the welcome follows when it is
      on_admitted(turn, known.id, known.incarnation)
    return True
  for old in turn.get().past:
    if old.nonce and old.nonce == nonce:
      newest = turn.get().incarnations[old.id]
      turn.send(peer, m.Superseded(island=old.id, incarnation=newest))
      return True
  return False


def _end_incarnation(turn: Turn, old: s.Island) -> None:
  """Keep the books of the latest ended incarnations open; close the oldest."""
  turn.note(
    'ended',
    island=old.id,
    incarnation=old.incarnation,
    step=old.step,
    tokens=old.tokens,
    trained=old.trained,
    lost=old.lost,
    lost_steps=old.lost_steps,
    first_step=old.first_step,
    carried=old.carried,
  )
  past = (*turn.get().past, old._replace(status=s.LEFT))
  for island in past[: -turn.limits.past_max]:
    membership.note_total(turn, island)
  turn.set(past=past[-turn.limits.past_max :])
