"""What `python -m diloco_jax simulate` does."""

from collections.abc import Callable, Iterator
import concurrent.futures
import multiprocessing
import sys
import time
from typing import NamedTuple

from diloco_jax.chaos import plan
from diloco_jax.simulation import scenario_json
from diloco_jax.simulation import swarm
from diloco_jax.simulation.coverage import PHASES
from diloco_jax.simulation.coverage import Tally
from diloco_jax.simulation.scenario import Scenario
from diloco_jax.simulation.shrink import shrink
from diloco_jax.simulation.trace import Trace

TIMING, NUMERIC = 'timing', 'numeric'
MODES = (TIMING, NUMERIC)
HOLE = 1  # exit code: something has never been exercised
# Of fewer seeds nobody expects that everything has occurred.
COVERAGE_SEEDS = 2000
CHUNK = 10
EVERY_S = 5.0

RunSeed = Callable[[int, Tally], swarm.Outcome]


class Part(NamedTuple):
  """What some of the seeds gave."""

  seeds: int
  events: int
  fault_free: int
  too_few: tuple[str, ...]
  tally: Tally
  failures: tuple[swarm.Failure, ...]


def _runner(mode: str) -> RunSeed:
  if mode == TIMING:
    return swarm.run_seed
  from diloco_jax.simulation import numeric

  return numeric.run_seed


def run_part(mode: str, begin: int, end: int) -> Part:
  """Some seeds, one after the other."""
  run_seed = _runner(mode)
  tally = Tally()
  events = fault_free = 0
  failures, too_few = [], []
  for seed in range(begin, end):
    outcome = run_seed(seed, tally)
    events += outcome.events
    fault_free += not outcome.planned
    if outcome.failure is not None:
      failures.append(outcome.failure)
    elif mode == TIMING:
      too_few += _too_few(seed, outcome)
  return Part(
    end - begin, events, fault_free, tuple(too_few), tally, tuple(failures)
  )


def _too_few(seed: int, outcome: swarm.Outcome) -> Iterator[str]:
  """A seed in which little happens checks little."""
  if outcome.events < swarm.EVENTS_MIN:
    yield f'seed {seed} has {outcome.events} events'
  if outcome.merges < swarm.MERGES_MIN:
    yield f'seed {seed} merges a fragment {outcome.merges} times'
  if outcome.planned and outcome.faults < swarm.FAULTS_MIN:
    yield f'seed {seed} has {outcome.faults} faults'


def parts(mode: str, seeds: range, jobs: int) -> Iterator[Part]:
  spans = [
    (x, min(x + CHUNK, seeds.stop))
    for x in range(seeds.start, seeds.stop, CHUNK)
  ]
  if jobs == 1:
    for begin, end in spans:
      yield run_part(mode, begin, end)
    return
  context = multiprocessing.get_context('spawn')
  with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
    waiting = [pool.submit(run_part, mode, *span) for span in spans]
    try:
      for future in concurrent.futures.as_completed(waiting):
        yield future.result()
    finally:
      pool.shutdown(cancel_futures=True)


class _Total:
  """All parts so far, and the line that tells of them."""

  def __init__(self, seeds: range):
    self._seeds = seeds
    self._began = self._told = time.monotonic()
    self.seeds = self.events = self.fault_free = 0
    self.too_few: list[str] = []
    self.tally = Tally()
    self.failures: list[swarm.Failure] = []

  def add(self, part: Part) -> None:
    self.seeds += part.seeds
    self.events += part.events
    self.fault_free += part.fault_free
    self.too_few += part.too_few
    self.tally.add(part.tally)
    self.failures += part.failures
    now = time.monotonic()
    if now - self._told > EVERY_S or self.seeds == len(self._seeds):
      self._told = now
      self._line(now - self._began)

  def _line(self, took: float) -> None:
    print(  # noqa: T201
      f'{self.seeds}/{len(self._seeds)} seeds, {self.events:,} events '
      f'({self.events / max(took, 1e-9):,.0f}/s), '
      f'{sum(self.tally.kinds.values()):,} faults, '
      f'{len(self.failures)} failures, {took:.0f} s',
      file=sys.stderr,
    )


def table(tally: Tally) -> str:
  """Faults by what was going on; how rounds closed; what was refused."""
  head = f'{"fault":20}{"in all":>8}' + ''.join(f'{x:>16}' for x in PHASES)
  lines = [head]
  for kind in plan.KINDS:
    counts = ''.join(f'{tally.faults[kind, x]:>16}' for x in PHASES)
    lines.append(f'{kind:20}{tally.kinds[kind]:>8}{counts}')
  for name, counter in (
    ('rounds closed', tally.closes),
    ('contributions refused', tally.refusals),
  ):
    told = ', '.join(f'{k} {n}' for k, n in counter.most_common())
    lines.append(f'{name}: {told}')
  return '\n'.join(lines)


def simulate(seeds: range, mode: str = TIMING, jobs: int = 1) -> int:
  """Run seeds; returns the exit code.

  127: the program crashed, 128: a run stood still, 129: a checker found
  something wrong, 1: with COVERAGE_SEEDS or more, something never occurred.
  """
  total = _Total(seeds)
  running = parts(mode, seeds, jobs)
  for part in running:
    total.add(part)
    if total.failures:
      break
  running.close()  # type: ignore[attr-defined]
  print(table(total.tally))  # noqa: T201
  if total.failures:
    first = min(total.failures, key=lambda x: x.seed)
    for failure in sorted(total.failures, key=lambda x: x.seed)[1:]:
      print(_one_line(failure, mode))  # noqa: T201
    print(explain(first, mode))  # noqa: T201
    return first.code
  holes = total.too_few
  if mode == TIMING:
    holes = holes + total.tally.holes(plan.KINDS)
  if len(seeds) < COVERAGE_SEEDS or not holes:
    return 0
  print(f'never occurred, or too little: {"; ".join(holes)}')  # noqa: T201
  return HOLE


def _one_line(failure: swarm.Failure, mode: str) -> str:
  return (
    f'FAILED seed {failure.seed} (exit {failure.code}) {failure.checker}: '
    f'{failure.sentence}\n  python -m diloco_jax simulate '
    f'--seeds={failure.seed}:{failure.seed + 1} --mode={mode}'
  )


def explain(failure: swarm.Failure, mode: str) -> str:
  """The last events of a failing seed, smaller if it can be."""
  trace = Trace()
  if mode == NUMERIC:
    from diloco_jax.simulation import numeric

    numeric.run_seed(failure.seed, observers=(trace,))
    told = ['The last events:', trace.text, failure.trace]
  else:
    assert failure.scenario is not None
    small = shrink(failure.scenario, lambda x: _fails_alike(x, failure))
    again = swarm.run(small, observers=(trace,)).failure
    assert again is not None
    told = [
      'The last events of the smallest run that fails alike:',
      trace.text,
      again.trace,
      f'{again.checker}: {again.sentence}',
      f'It is {scenario_json.to_json(small)}',
      'and runs again with simulate --scenario=FILE, that line in the file.',
    ]
  return '\n'.join([*told, _one_line(failure, mode)])


def _fails_alike(scenario: Scenario, failure: swarm.Failure) -> bool:
  found = swarm.run(scenario).failure
  return found is not None and (found.code, found.checker) == (
    failure.code,
    failure.checker,
  )


def rerun(scenario: Scenario) -> int:
  """One scenario from a file; returns the exit code."""
  trace = Trace()
  outcome = swarm.run(scenario, observers=(trace,))
  if outcome.failure is None:
    print(f'{outcome.events} events, nothing wrong; trace {trace.digest}')  # noqa: T201
    return 0
  failure = outcome.failure
  print(trace.text)  # noqa: T201
  print(f'FAILED (exit {failure.code}) {failure.checker}: {failure.sentence}')  # noqa: T201
  return failure.code
