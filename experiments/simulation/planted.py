"""Bugs to plant in the protocol, to see that the checkers find them.

Each is a context manager that replaces one rule of the protocol by a wrong
one, for as long as it is open. Where a second rule stands behind the first,
both are replaced, and the docstring says so.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
from unittest import mock

from diloco_jax.protocol import admission
from diloco_jax.protocol import adoption
from diloco_jax.protocol import guard
from diloco_jax.protocol import island_state
from diloco_jax.protocol import island_turn
from diloco_jax.protocol import ledger
from diloco_jax.protocol import membership
from diloco_jax.protocol import merging
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import recovering
from diloco_jax.protocol import recovery
from diloco_jax.protocol import rounds
from diloco_jax.protocol import schedule
from diloco_jax.protocol import syncer
from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol import turn as turn_lib

Planted = Callable[[], contextlib.AbstractContextManager[None]]
BUGS: dict[str, Planted] = {}
replace = mock.patch.object


def bug(plant: Callable[[], Iterator[None]]) -> Planted:
  made = contextlib.contextmanager(plant)
  BUGS[plant.__name__] = made
  return made


def _retargeted(turn, c):
  """The same contribution, as if for the round that is open now."""
  for rnd in turn.rounds.values():
    if rnd.fragment == c.fragment and rnd.phase == s.COLLECTING:
      return dataclasses.replace(c, round=rnd.id)
  return c


def _guard_without(*reasons):
  """The guard of bases, blind to some of its reasons."""
  real = guard._base_problem

  def wrong(turn, c):
    reason = real(turn, c)
    return '' if reason in reasons else reason

  return replace(guard, '_base_problem', wrong)


# Rounds and contributions.


@bug
def accept_a_duplicate_contribution():
  """A repeat enters the next round. The guard of bases goes with it."""
  real = rounds.on_contribution

  def wrong(turn, c):
    own = turn.fragments[c.fragment].included.get(c.island)
    again = own is not None and c.capture <= own.capture
    real(turn, _retargeted(turn, c) if again else c)

  with (
    replace(rounds, 'on_contribution', wrong),
    _guard_without('stale_base', 'repeated'),
  ):
    yield


@bug
def ignore_the_incarnation():
  """Whatever an island says is taken as said by its newest incarnation."""
  report, contribution = membership.on_report, rounds.on_contribution

  def newest(turn, message):
    island = turn.islands.get(message.island)
    if island is None:
      return message
    return dataclasses.replace(message, incarnation=island.incarnation)

  with (
    replace(
      membership, 'on_report', lambda t, peer, x: report(t, peer, newest(t, x))
    ),
    replace(
      rounds, 'on_contribution', lambda t, x: contribution(t, newest(t, x))
    ),
  ):
    yield


@bug
def pull_without_the_last_merge():
  """An island is asked that has not reported the last version with its work."""
  with replace(rounds, '_holds_own_work', lambda turn, island, p: True):
    yield


@bug
def merge_the_same_work_twice():
  """Nobody looks whether the last merge has come back, at neither end."""
  with (
    replace(rounds, '_holds_own_work', lambda turn, island, p: True),
    _guard_without('stale_base', 'repeated'),
  ):
    yield


@bug
def merge_a_stale_round():
  """An answer to a round that is over enters the one that is open.

  The guard of bases goes with it.
  """
  real = rounds.on_contribution

  def wrong(turn, c):
    stale = c.round not in turn.rounds
    real(turn, _retargeted(turn, c) if stale else c)

  with (
    replace(rounds, 'on_contribution', wrong),
    _guard_without('stale', 'stale_base', 'repeated', 'timeline'),
  ):
    yield


@bug
def an_old_incarnation_stays_in_an_open_round():
  real = rounds.drop_from_open

  def wrong(turn, island, incarnation, why):
    if why != 'restarted':
      real(turn, island, incarnation, why)

  with replace(rounds, 'drop_from_open', wrong):
    yield


@bug
def merge_what_was_refused():
  """A payload that is not usable is merged all the same."""
  real = rounds.on_inspected

  def wrong(turn, event):
    real(turn, dataclasses.replace(event, reason=''))

  with replace(rounds, 'on_inspected', wrong):
    yield


@bug
def ignore_staleness():
  with _guard_without('stale'):
    yield


@bug
def a_grace_window_that_never_ends():
  with replace(schedule, 'grace_s', lambda **_: 1e9):
    yield


@bug
def close_before_the_grace_window():
  """A round closes at its quorum, and says that the window is over."""
  real = rounds._start_grace

  def wrong(turn, rnd):
    rnd = real(turn, rnd)
    return turn.round(rnd.id, grace_until=turn.now)

  with replace(rounds, '_start_grace', wrong):
    yield


@bug
def charge_only_the_holders():
  real = schedule.charge

  def wrong(credits, stride):
    return credits if credits < stride else real(credits, stride)

  with replace(schedule, 'charge', wrong):
    yield


@bug
def keep_the_payload_of_what_was_refused():
  """A refused contribution is never forgotten."""
  real = rounds._refuse

  def wrong(turn, c, reason):
    with replace(type(turn), 'release', lambda turn, handle: None):
      real(turn, c, reason)

  with replace(rounds, '_refuse', wrong):
    yield


@bug
def open_rounds_without_a_bound():
  """All fragments may be in flight. The invariants are a second line."""
  real = rounds.open_due

  def wrong(turn):
    settings = turn.settings
    turn.settings = dataclasses.replace(
      settings, overlap=max(1, settings.overlap) + 1
    )
    real(turn)
    turn.settings = settings

  with replace(rounds, 'open_due', wrong):
    yield


# Merging and versions.


@bug
def sum_in_arrival_order():
  def wrong(rnd):
    given = (x for x in rnd.members if x.status == s.CONTRIBUTED)
    return tuple(sorted(given, key=lambda x: x.contribution.payload))

  with replace(s.Round, 'contributed', property(wrong)):
    yield


@bug
def broadcast_before_the_line_is_durable():
  merged, written = merging.on_merged, syncer._on_tape_written

  def wrong(turn, event):
    merged(turn, event)
    merging.commit(turn, turn.rounds[event.round])

  def ignore(turn, key):
    if not key.startswith('merge:'):
      written(turn, key)

  with (
    replace(merging, 'on_merged', wrong),
    replace(syncer, '_on_tape_written', ignore),
  ):
    yield


@bug
def broadcast_while_one_is_on_its_way():
  real = turn_lib.Turn.broadcast

  def wrong(turn, island, fragment):
    with replace(turn_lib.Turn, 'resend_after', lambda turn, island: 0.0):
      real(turn, island, fragment)

  with replace(turn_lib.Turn, 'broadcast', wrong):
    yield


@bug
def never_say_it_again():
  """What was lost on its way is not sent a second time."""
  with replace(turn_lib.Turn, 'resend_after', lambda turn, island: 1e9):
    yield


@bug
def skip_a_version():
  """A merge grows a version by two. The invariants are a second line."""
  real = m.Version

  def wrong(incarnation, merges):
    return real(incarnation, merges + 1)

  with replace(merging.m, 'Version', wrong):
    yield


# Islands.


@bug
def reset_the_counters_on_send():
  real = island_turn.Turn.send_capture

  def wrong(turn, fragment):
    real(turn, fragment)
    held = turn.held[fragment]
    sent = held.capture is not None and held.capture.handle
    if sent and turn.get().peer:
      turn.held[fragment] = held._replace(
        step0=turn.get().boundary, tokens0=turn.get().tokens
      )

  with replace(island_turn.Turn, 'send_capture', wrong):
    yield


@bug
def adopt_an_older_version():
  """Whatever comes is adopted. The assertion behind it goes with it."""
  broadcast, adopt = adoption.on_broadcast, adoption.adopt

  def wrong(turn, message):
    held = turn.held[message.fragment]
    if held.anchor is not None and message.version < held.anchor:
      turn.held[message.fragment] = held._replace(anchor=None)
      broadcast(turn, message)
      turn.held[message.fragment] = turn.held[message.fragment]._replace(
        anchor=held.anchor
      )
    else:
      broadcast(turn, message)

  def wrong_too(turn, fragment):
    held = turn.held[fragment]
    incoming = held.incoming
    if held.anchor is not None and incoming.version <= held.anchor:
      turn.held[fragment] = held._replace(anchor=None)
    return adopt(turn, fragment)

  with (
    replace(adoption, 'on_broadcast', wrong),
    replace(adoption, 'adopt', wrong_too),
  ):
    yield


@bug
def rebase_on_the_kept_capture():
  """Any kept capture is taken out of the local value, named or not."""

  def wrong(held, incoming):
    capture = held.capture
    return capture.id if capture is not None else None

  with replace(adoption, '_kept_capture', wrong):
    yield


@bug
def offer_merged_work_again():
  """The named capture stays in local - anchor."""
  with replace(adoption, '_kept_capture', lambda held, incoming: None):
    yield


@bug
def count_tokens_twice_after_a_restart():
  """What older incarnations trained counts as the new one's too."""
  real = island_state.restored

  def wrong(*args, **kwargs):
    return real(*args, **kwargs)._replace(tokens_before=0)

  with replace(island_state, 'restored', wrong):
    yield


# Membership and leases.


@bug
def a_dead_island_keeps_its_membership():
  with replace(membership, '_lease', lambda turn: 1e9):
    yield


@bug
def a_dead_island_keeps_its_samples():
  """What it trained and did not give is not leased again."""

  def wrong(turn, old):
    return old.begin + (old.step - old.first_step) * old.samples_per_step

  with replace(ledger, 'next_begin', wrong):
    yield


@bug
def lease_merged_samples_again():
  with replace(ledger, 'next_begin', lambda turn, old: old.begin):
    yield


@bug
def a_newcomer_seeds_state():
  real = membership.welcome

  def wrong(turn, index, seed_wanted=False):
    del seed_wanted
    real(turn, index, seed_wanted=True)

  with replace(membership, 'welcome', wrong):
    yield


@bug
def start_before_owed_work_is_back():
  """A newcomer trains while a closed round holds its predecessor's work."""

  def wrong(turn, island):
    oldest = m.Version(turn.get().incarnation, 0)
    return bool(island.versions) and min(island.versions) >= oldest

  with replace(membership, '_holds_all', wrong):
    yield


# Recovery.


def _choices(wrong):
  return replace(recovering, '_choice', wrong)


@bug
def trust_an_unconfirmed_anchor():
  """The newest anchor of anybody is taken back, on the tape or not."""
  real = recovering._choice

  def wrong(turn, fragment):
    answers = recovering.get(turn).answers
    held = [
      (x.versions[fragment], x.digests[fragment], island)
      for island, x in sorted(answers.items())
      if x.versions
    ]
    if not held:
      return real(turn, fragment)
    version, digest, island = max(held)
    made = recovery.Made(version, digest)
    return recovering._Choice(made, recovering.a.ANCHOR, (island,))

  with _choices(wrong):
    yield


@bug
def take_back_too_old_a_version():
  """The oldest version that somebody holds is taken back."""
  real = recovering._choice

  def wrong(turn, fragment):
    state = recovering.get(turn)
    history = state.memory.history
    for made in history[fragment]:
      short = list(history)
      short[fragment] = (made,)
      memory = state.memory._replace(history=tuple(short))
      recovering.put(turn, memory=memory)
      choice = real(turn, fragment)
      recovering.put(turn, memory=state.memory)
      if choice is not None:
        return choice
    return None

  with _choices(wrong):
    yield


@bug
def recover_without_waiting():
  """The first answer decides; others may hold newer versions."""
  with replace(
    recovering, '_complete', lambda turn: bool(recovering.get(turn).answers)
  ):
    yield


@bug
def keep_the_count_of_what_was_lost():
  """Merges that a restart lost still count as merged."""
  real = recovery.taken_back

  def wrong(memory, *args):
    return real(memory, *args)._replace(
      merged=memory.merged, merges=memory.merges
    )

  with replace(recovery, 'taken_back', wrong):
    yield


@bug
def reuse_the_syncers_incarnation():
  """A restarted syncer speaks as its predecessor. It is the tape's to know."""
  real = recovery.read_tape

  def wrong(settings, lines):
    memory = real(settings, lines)
    return memory._replace(incarnation=max(0, memory.incarnation - 1))

  with replace(recovery, 'read_tape', wrong):
    yield


@bug
def admit_without_ending_the_old_one():
  """A rejoined island's old books are forgotten."""
  with replace(admission, '_end_incarnation', lambda turn, old: None):
    yield
