"""Nothing is merged twice, nothing is forgotten, and the counts say so."""

from typing import Any

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol.settings import EACH
from diloco_jax.protocol.settings import Settings
from diloco_jax.simulation import round_book
from diloco_jax.simulation import spans as sp
from diloco_jax.simulation.books import Books
from diloco_jax.simulation.books import Given
from diloco_jax.simulation.books import Local
from diloco_jax.simulation.checking import Checker
from diloco_jax.simulation.checking import Moment
from diloco_jax.simulation.round_book import RoundBook


class WorkChecker(Checker):
  """A checker that reads the books."""

  def __init__(self, settings: Settings, books: Books, rounds: RoundBook):
    self.settings = settings
    self.books = books
    self.theta = books.theta
    self.rounds = rounds


class StepsEnterOnce(WorkChecker):
  """An (island, incarnation, fragment, inner step) enters Θ at most once."""

  def syncer_does_write_tape(self, at: Moment, line: a.WriteTape) -> None:
    del at
    if not line.key.startswith('merge:'):
      return
    fields = dict(line.fields)
    p = fields['fragment']
    for island, incarnation, number, *_ in fields['inputs']:
      given = self.books.given.get((island, incarnation, p, number))
      if given is None:
        self.fail(f'{line.key} merges capture {number} of {island}, unknown')
        return
      twice = self.theta.inside(p, given.spans)
      if twice is not None:
        self.fail(
          f'{line.key} merges steps {twice[1] + 1}..{twice[2]} of island '
          f'{island}.{incarnation} into fragment {p} a second time'
        )


class NothingIsOfferedTwice(WorkChecker):
  """What an island holds beyond its anchor is not in that anchor already."""

  def island_does_step_plan(self, at: Moment, plan: a.StepPlan) -> None:
    for order in plan.adopt:
      local = self.books.local(at)
      p = order.fragment
      twice = self.theta.inside(p, local.pending(p), order.version)
      if twice is not None:
        self.fail(
          f'{at.who} adopted {tuple(order.version)} of fragment {p} and still '
          f'offers steps {twice[1] + 1}..{twice[2]}, which are in it'
        )


class CountersAreTrue(WorkChecker):
  """Counters and contributions tell the steps and tokens that are there."""

  def _check_pending(self, at: Moment, p: int) -> None:
    pending = self.books.local(at).pending(p)
    held = at.new.held[p]
    steps = at.new.boundary - held.step0
    tokens = at.new.tokens - held.tokens0
    there = sp.count(pending), self.books.tokens(pending)
    if (steps, tokens) != there:
      self.fail(
        f'{at.who} counts {steps} steps and {tokens} tokens pending in '
        f'fragment {p}; there are {there[0]} and {there[1]}'
      )

  def island_does_step_plan(self, at: Moment, plan: a.StepPlan) -> None:
    for order in (*plan.adopt, *plan.capture):
      self._check_pending(at, order.fragment)

  def island_sends_contribution(self, at: Moment, c: m.Contribution) -> None:
    self._check_pending(at, c.fragment)
    key = c.island, c.incarnation, c.fragment, c.capture.number
    given = self.books.given.get(key)
    if given is None:
      self.fail(f'{at.who} contributes a capture that it never made: {key}')
    elif told(c) != told_by(given):
      self.fail(
        f'{at.who} says (steps, tokens, base, step) {told(c)} of capture '
        f'{key}; it holds {told_by(given)}'
      )


def told(c: m.Contribution) -> tuple[Any, ...]:
  return c.c_steps, c.c_tokens, c.base, c.step


def told_by(given: Given) -> tuple[Any, ...]:
  return sp.count(given.spans), given.tokens, given.base, given.step


class MergesAreWhatWasGiven(WorkChecker):
  """A merge sums its round's contributions, in island-id order, no others."""

  def syncer_does_merge(self, at: Moment, merge: a.Merge) -> None:
    del at
    rnd = self.rounds.rounds.get(merge.round)
    if rnd is None or not rnd.closed:
      self.fail(f'{merge.round} is merged and has not closed')
      return
    islands = [x.island for x in merge.inputs]
    if islands != sorted(set(islands)):
      self.fail(f'{merge.round} is summed in the order {islands}')
    given = sorted(rnd.having(round_book.IN))
    if sorted(islands) != given:
      self.fail(f'{merge.round} merges {islands}; {given} contributed')
    for x in merge.inputs:
      c = rnd.members[x.island].contribution
      assert c is not None
      if x.handle != c.payload or x.weight != c.c_tokens**2 / c.c_steps:
        self.fail(f'{merge.round}: {x} is not the contribution of {x.island}')

  def syncer_does_write_tape(self, at: Moment, line: a.WriteTape) -> None:
    del at
    if not line.key.startswith('merge:'):
      return
    fields = dict(line.fields)
    rnd = self.rounds.rounds[fields['round']]
    if rnd.merge is None:
      self.fail(f'{line.key} tells of a merge that was not made')
      return
    inputs = {x[0]: x for x in fields['inputs']}
    if list(inputs) != [x.island for x in rnd.merge.inputs]:
      self.fail(f'{line.key} tells of {list(inputs)}, merged was {rnd.merge}')
    for island, incarnation, number, *said in inputs.values():
      given = self.books.given.get((island, incarnation, rnd.fragment, number))
      if given is None:
        continue  # StepsEnterOnce says so
      count = sp.count(given.spans)
      there = [count, given.tokens, given.tokens**2 / count, given.step]
      if said != there:
        self.fail(f'{line.key} says {said} of island {island}, not {there}')


class BasesAreFresh(WorkChecker):
  """No merge uses a base of another timeline, or one that is too old."""

  def syncer_does_inspect(self, at: Moment, action: a.Inspect) -> None:
    c = at.event.message
    p = c.fragment
    newest = self.theta.newest(p)
    if newest is None:
      self.fail(f'a contribution to fragment {p} before there is a Θ')
      return
    who = f'the contribution of island {c.island}.{c.incarnation} to {c.round}'
    known = self.books.given.get((c.island, c.incarnation, p, c.capture.number))
    if known is None or told(c) != told_by(known):
      self.fail(f'{who} was altered on its way and is accepted')
    if c.fingerprint != self.settings.fingerprint:
      self.fail(f'{who} has another layout')
    if c.incarnation != at.old.islands[c.island].incarnation:
      self.fail(f'{who} is of an incarnation that is over')
    if c.base.incarnation != at.new.incarnation or c.base > newest:
      self.fail(f'{who} is relative to {tuple(c.base)}, of another timeline')
    last = self.theta.last[p].get(c.island)
    if last is not None and last.given.incarnation == c.incarnation:
      if c.base < last.version or c.capture.number <= last.given.number:
        self.fail(
          f'{who} is relative to {tuple(c.base)}; its last merge made '
          f'{tuple(last.version)}'
        )
    self._check_staleness(at, c, newest, who)

  def _check_staleness(
    self, at: Moment, c: m.Contribution, newest: m.Version, who: str
  ) -> None:
    limit = self.settings.staleness_max
    if limit < 0:
      return
    behind: float = newest.merges - c.base.merges
    declined = at.new.fragments[c.fragment].declined.get(c.island, ())
    behind -= sum(x > c.base.merges for x in declined)
    if self.settings.mode == EACH:
      live = sum(
        x.id >= 0 and x.status == s.LIVE for x in at.old.islands.values()
      )
      behind /= max(1, live)
    if behind > limit:
      self.fail(f'{who} is {behind} versions behind, at most {limit}')


class BooksBalance(WorkChecker):
  """Trained = merged + lost + pending, per fragment and in whole samples."""

  def __init__(self, settings: Settings, books: Books, rounds: RoundBook):
    super().__init__(settings, books, rounds)
    self._total = sum(settings.sizes)
    self._carried: dict[int, tuple[list[sp.Spans], int]] = {}

  def island_does_begin(self, at: Moment, action: a.Begin) -> None:
    del action
    local = self.books.local(at)
    spans = [local.pending(p) for p in range(self.settings.fragments)]
    carried = sum(
      size * self.books.tokens(x)
      for size, x in zip(self.settings.sizes, spans, strict=True)
    )
    self._carried[local.number] = spans, carried
    if at.new.carried != carried:
      self.fail(
        f'{at.who} carries {at.new.carried} token_params, not {carried}'
      )

  def island_sends_report(self, at: Moment, report: m.Report) -> None:
    local = self.books.locals.get((at.who, at.life)) or self.books.local(at)
    tokens = local.tokens
    _, carried = self._carried.get(local.number, ((), 0))
    made = tokens[report.step - local.first]
    trained = (made - tokens[0]) * self._total + carried
    if report.tokens != made or report.trained_token_params != trained:
      self.fail(
        f'{at.who} reports {report.trained_token_params} token_params trained '
        f'at step {report.step}; it has trained {trained}'
      )

  def island_sends_leave(self, at: Moment, message: m.Leave) -> None:
    """The books of a whole life, where nothing of it is on its way."""
    del message
    local = self.books.local(at)
    if local.number not in self._carried or local.lost_versions:
      return
    newest = max(k[1] for k in self.books.locals if k[0] == at.who)
    if newest != at.life or local.kept:
      return
    for p, anchor in enumerate(local.anchor):
      last = self.theta.last[p].get(local.index)
      if anchor is None or anchor not in self.theta.place[p]:
        return
      if last is not None and last.version > anchor:
        return
    carried, _ = self._carried[local.number]
    lost = sum(
      size * self._lost(local, p, carried[p])
      for p, size in enumerate(self.settings.sizes)
    )
    if at.new.lost != lost:
      self.fail(f'{at.who} says it lost {at.new.lost} token_params, not {lost}')

  def _lost(self, local: Local, p: int, carried: sp.Spans) -> int:
    """Tokens of steps that are neither in Θ nor pending."""
    left = (*carried, (local.number, local.first, local.step))
    left = sp.without(left, local.pending(p))
    for life in {x[0] for x in left}:
      inside = tuple(
        (life, after, upto)
        for after, upto, _ in self.theta.entered[p].get(life, ())
      )
      left = sp.without(left, inside)
    return self.books.tokens(left)

  def syncer_sees_tape_written(self, at: Moment, event: a.TapeWritten) -> None:
    if not event.key.startswith(('merge:', 'recovered:')):
      return
    said = at.new.merged_token_params, at.new.merges
    there = self.theta.merged_total, self.theta.merges
    if said != there:
      self.fail(
        f'after {event.key} the syncer counts (token_params, merges) {said}; '
        f'in Θ are {there}'
      )

  def syncer_notes_island_total(self, at: Moment, note: dict[str, Any]) -> None:
    del at
    trained, merged, lost, pending = (
      note[f'{x}_token_params']
      for x in ('trained', 'merged', 'lost', 'pending')
    )
    who = f'island {note["island"]}.{note["incarnation"]}'
    if trained != merged + lost + pending or min(merged, lost, pending) < 0:
      self.fail(f'{who}: {trained} trained = {merged} + {lost} + {pending}')
    inside = self.theta.merged.get((note['island'], note['incarnation']), 0)
    if merged != inside:
      self.fail(f'{who}: {merged} token_params merged, in Θ are {inside}')


class SamplesAreLeasedOnce(WorkChecker):
  """A lease begins right after what its predecessors have in Θ."""

  def __init__(self, settings: Settings, books: Books, rounds: RoundBook):
    super().__init__(settings, books, rounds)
    self._leases: dict[tuple[int, int], dict[str, Any]] = {}

  def syncer_does_write_tape(self, at: Moment, line: a.WriteTape) -> None:
    del at
    if not line.key.startswith('admitted:'):
      return
    new = dict(line.fields)
    island, incarnation = new['island'], new['incarnation']
    self._leases[island, incarnation] = new
    begins = [0]
    old = self._leases.get((island, incarnation - 1))
    if old is not None:
      newest = self._newest_step(island, incarnation - 1)
      begins = [
        old['begin'] + max(0, x - old['first_step']) * old['samples_per_step']
        for x in (newest, *self._unsure_steps(island, incarnation - 1))
        if x >= newest
      ]
    if new['begin'] not in begins:
      self.fail(
        f'island {island}.{incarnation} is leased samples from {new["begin"]} '
        f'on; its predecessor has spent those before {begins}'
      )

  def _unsure_steps(self, island: int, incarnation: int) -> list[int]:
    """Steps of merges whose lines a dead syncer may have left on its disk."""
    return [
      share.step
      for made in self.books.unsure
      for share in made.shares
      if (share.island, share.incarnation) == (island, incarnation)
    ]

  def _newest_step(self, island: int, incarnation: int) -> int:
    newest = self.theta.newest_step(island, incarnation)
    for rnd in self.rounds.rounds.values():
      member = rnd.members.get(island)
      if rnd.closed and member is not None and member.status == round_book.IN:
        assert member.contribution is not None
        if member.incarnation == incarnation:
          newest = max(newest, member.contribution.step)
    return newest

  def syncer_sends_start(self, at: Moment, start: m.Start) -> None:
    del at
    lease = self._leases[start.island, start.incarnation]
    lanes = max(self.settings.islands_max, self.settings.islands)
    want = m.SampleRange(start.island, lanes, lease['begin'], -1)
    if start.samples != want:
      self.fail(f'{start} starts elsewhere than its lease, {want}')


CHECKERS = (
  StepsEnterOnce, NothingIsOfferedTwice, CountersAreTrue,
  MergesAreWhatWasGiven, BasesAreFresh, BooksBalance, SamplesAreLeasedOnce,
)  # fmt: skip
