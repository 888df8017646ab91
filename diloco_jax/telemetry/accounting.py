"""What a run's figures mean: steps, time, tokens, traffic.

Functions of tape lines and metrics rows. Sums of tokens stay exact integers
(token_params: tokens times parameters, summed over fragments) until one last
division by the number of parameters.
"""

from collections.abc import Iterable, Mapping, Sequence
import statistics
from typing import Any, NamedTuple

import numpy as np

Row = Mapping[str, Any]

GAP_STEPS = 10  # median steps without a step anywhere before it is downtime


# Steps and time.


def steps_of(row: Row) -> int:
  """Inner steps that a metrics row covers."""
  return int(row.get('steps') or 0)


def step_times_s(rows: Iterable[Row]) -> np.ndarray:
  """The time of every inner step, f64[steps], in seconds."""
  timed = [row for row in rows if steps_of(row) and row.get('step_time_s')]
  return np.repeat(
    np.array([row['step_time_s'] for row in timed], np.float64),
    np.array([steps_of(row) for row in timed], np.int64),
  )


def median_step_s(rows: Iterable[Row]) -> float | None:
  """Median time of an inner step, over the steps of all islands."""
  times = step_times_s(rows)
  return float(np.median(times)) if times.size else None


def finish_times_s(rows: Sequence[Row]) -> np.ndarray:
  """When one island's steps finished, f64[steps], ascending.

  A row says when its last step finished; the others are placed one mean step
  time apart, never before the row before it.
  """
  times = [np.zeros(0)]
  before = -np.inf
  for row in rows:
    steps = steps_of(row)
    if not steps:
      continue
    back = np.arange(steps - 1, -1, -1) * (row.get('step_time_s') or 0.0)
    times.append(np.maximum(row['t_s'] - back, min(before, row['t_s'])))
    before = row['t_s']
  return np.concatenate(times)


def train_s(finished_s: np.ndarray, step_s: float) -> float:
  """Seconds from the beginning of the first step that finished to the end of
  the last; the first is taken to last a median step, so that compiling is
  not in it.

  Args:
    finished_s: when steps finished, of all islands, ascending.
    step_s: median step time.
  """
  return float(finished_s[-1] - finished_s[0]) + step_s


def downtime_s(finished_s: np.ndarray, step_s: float) -> float:
  """Seconds beyond 10 median steps in gaps in which no island finished one."""
  beyond = np.diff(finished_s) - GAP_STEPS * step_s
  return float(beyond[beyond > 0].sum())


def goodput(
  steps: int, islands: int, train_s: float, step_s: float
) -> float | None:
  """Inner steps done, as a share of what the islands could have done.

  goodput = steps / (islands * train_s / step_s)

  Args:
    steps: inner steps done by all islands.
    islands: that the run was configured with.
    train_s: seconds of training.
    step_s: median step time, or the configured floor.
  """
  possible = islands * train_s / step_s if step_s > 0 else 0.0
  return steps / possible if possible > 0 else None


def effective_h(tape: Iterable[Row], each: bool = False) -> float | None:
  """Median island's inner steps between merges of one fragment.

  For an island and a fragment: the mean rise of the island's reported step
  from one merge of the fragment to the next, which is (last - first) /
  (merges - 1) for an island that is there throughout. Then the mean over
  fragments, then the median over islands. The merges that drain a run are
  left out, and so are spans in which the island was away or restarted.

  Args:
    tape: the syncer's.
    each: every round is one island's own; its own merges count.
  """
  before: dict[int, dict[int, int]] = {}
  rises: dict[int, dict[int, list[int]]] = {}
  for line in tape:
    if line['kind'] != 'merge' or line.get('drain'):
      continue
    fragment = line['fragment']
    steps = dict(line['steps'])
    if each:
      own = {contribution[0] for contribution in line['inputs']}
      steps = {key: step for key, step in steps.items() if key in own}
    last = before.get(fragment, {})
    for island, step in steps.items():
      if island in last and step >= last[island]:
        of_island = rises.setdefault(island, {})
        of_island.setdefault(fragment, []).append(step - last[island])
    before[fragment] = {**last, **steps} if each else steps
  if not rises:
    return None
  return statistics.median(
    statistics.fmean(statistics.fmean(spans) for spans in of_island.values())
    for of_island in rises.values()
  )


# Tokens.


class TokenParams(NamedTuple):
  """Exact sums over a run; trained = merged + lost + pending."""

  trained: int
  merged: int
  lost: int  # by overwriting, and what died with its island
  pending: int  # of islands that were alive at the end
  overlap_discarded: int  # the part of lost that overwriting dropped


def sizes_of(tape: Iterable[Row]) -> list[int]:
  """Parameters in each fragment; [] where the tape does not say."""
  sizes: list[int] = []
  for line in tape:
    if line['kind'] == 'run_started':
      sizes = list(line['sizes'])
  return sizes


def per_parameter(token_params: int | None, parameters: int) -> float | None:
  """Tokens: the one division; an integer where it leaves no rest."""
  if token_params is None or not parameters:
    return None
  whole, rest = divmod(token_params, parameters)
  return token_params / parameters if rest else whole


def merged_token_params(
  tape: Iterable[Row],
) -> dict[tuple[int, int], int]:
  """(island, incarnation) -> token_params in merges, from the merge lines."""
  merged: dict[tuple[int, int], int] = {}
  sizes: list[int] = []
  for line in tape:
    if line['kind'] == 'run_started':
      sizes = line['sizes']
    elif line['kind'] == 'merge':
      for island, incarnation, _, _, c_tokens, *_ in line['inputs']:
        key = (island, incarnation)
        amount = c_tokens * sizes[line['fragment']]
        merged[key] = merged.get(key, 0) + amount
  return merged


def island_totals(tape: Iterable[Row]) -> dict[tuple[int, int], Row]:
  """The newest island_total line of each (island, incarnation)."""
  return {
    (line['island'], line['incarnation']): line
    for line in tape
    if line['kind'] == 'island_total'
  }


def _lapsed(tape: Iterable[Row]) -> set[tuple[int, int]]:
  """Incarnations whose lease lapsed and that did not come back."""
  away = set()
  for line in tape:
    if line['kind'] == 'lapsed':
      away.add((line['island'], line['incarnation']))
    elif line['kind'] == 'readmitted':
      away.discard((line['island'], line['incarnation']))
  return away


def token_params(tape: Sequence[Row]) -> TokenParams | None:
  """The books of a finished run; None before the tape has them."""
  totals = island_totals(tape)
  if not totals:
    return None
  away = _lapsed(tape)
  trained = merged = lost = pending = discarded = 0
  for key, line in totals.items():
    trained += line['trained_token_params']
    merged += line['merged_token_params']
    discarded += line['lost_token_params']
    lost += line['lost_token_params']
    # What a dead island had not given is given by nobody.
    if line['alive'] and key not in away:
      pending += line['pending_token_params']
    else:
      lost += line['pending_token_params']
  return TokenParams(trained, merged, lost, pending, discarded)


def accounting_problems(tape: Sequence[Row]) -> tuple[str, ...]:
  """Where the books do not add up, a sentence each; () is what should be."""
  problems = []
  from_merges = merged_token_params(tape)
  totals = island_totals(tape)
  recovered = len(
    {x['incarnation'] for x in tape if x['kind'] == 'run_started'}
  )
  for (island, incarnation), line in sorted(totals.items()):
    who = f'island {island}, incarnation {incarnation}'
    trained, merged, lost, pending = (
      line[f'{name}_token_params']
      for name in ('trained', 'merged', 'lost', 'pending')
    )
    if trained != merged + lost + pending:
      problems.append(
        f'{who}: trained {trained} is not merged {merged} + lost {lost}'
        f' + pending {pending} token_params'
      )
    if min(merged, lost, pending) < 0:
      problems.append(f'{who}: merged, lost or pending is negative')
    on_tape = from_merges.pop((island, incarnation), 0)
    # A restarted syncer may have had to give up merges that are on the tape.
    if merged > on_tape or (merged < on_tape and recovered <= 1):
      problems.append(
        f'{who}: merged {merged} token_params, its merges on the tape hold'
        f' {on_tape}'
      )
  if totals:
    problems.extend(
      f'island {island}, incarnation {incarnation}: merges, but no total'
      for island, incarnation in sorted(from_merges)
    )
  return tuple(problems)


# Traffic.


class Counter:
  """The running total of a counter that starts anew with each process."""

  def __init__(self) -> None:
    self._before = 0.0
    self._last: float | None = None

  def add(self, value: float | None) -> None:
    if value is None:
      return
    if self._last is not None and value < self._last:
      self._before += self._last
    self._last = value

  @property
  def total(self) -> int | float | None:
    """None before the first value."""
    if self._last is None:
      return None
    total = self._before + self._last
    return int(total) if total == int(total) else total


def counter_total(values: Iterable[float | None]) -> int | float | None:
  counter = Counter()
  for value in values:
    counter.add(value)
  return counter.total


# Three honest counts.


class Participation(NamedTuple):
  """Means over a run's rounds; see `participation`."""

  live: float | None
  participating: float | None
  committed: float | None


def participation(tape: Iterable[Row]) -> Participation:
  """Live and participating islands are means over closed rounds, committed
  contributions over merges.
  """
  closed = [line for line in tape if line['kind'] == 'round_closed']
  merges = [line for line in tape if line['kind'] == 'merge']

  def mean(values: list[int]) -> float | None:
    return statistics.fmean(values) if values else None

  return Participation(
    live=mean([line['live'] for line in closed]),
    participating=mean([line['participating'] for line in closed]),
    committed=mean([len(line['inputs']) for line in merges]),
  )
