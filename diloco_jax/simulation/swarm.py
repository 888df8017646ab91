"""A seed draws a whole scenario; a swarm runs many, with all checkers on."""

from collections.abc import Callable
import dataclasses
import random
import traceback
from typing import Any, NamedTuple

from diloco_jax.chaos import plan
from diloco_jax.protocol import settings as settings_lib
from diloco_jax.protocol.invariants import InvariantError
from diloco_jax.protocol.settings import Limits
from diloco_jax.protocol.settings import Settings
from diloco_jax.simulation import checking
from diloco_jax.simulation.books import Books
from diloco_jax.simulation.checkers import Checkers
from diloco_jax.simulation.compute import ComputeSettings
from diloco_jax.simulation.coverage import Tally
from diloco_jax.simulation.liveness import EveryFragmentAdvances
from diloco_jax.simulation.network import NetworkSettings
from diloco_jax.simulation.scenario import Scenario
from diloco_jax.simulation.storage import DiskSettings
from diloco_jax.simulation.world import World

FAULT_FREE = 0.03  # share of the seeds
EVENTS_MIN = 3000  # of a run, so that there is something to check
MERGES_MIN = 5  # of every fragment
FAULTS_MIN = 5  # unless it is drawn without any
LENGTHS = (1, 2, 4, 8)  # tried until enough happens
PERIODS = 8  # of the run, at least
STEPS_MAX = 400  # of all islands in PERIODS periods, where they can be short

# Limits that a simulated run reaches in its time.
LIMITS = Limits(
  lease_s=12.0, compiling_s=60.0, restoring_s=60.0, saving_s=60.0,
  evaluating_s=60.0, start_timeout_s=30.0, quarantine_s=20.0,
  quorum_timeout_floor_s=6.0, drain_timeout_s=40.0, answer_s=4.0,
  donation_s=8.0,
)  # fmt: skip


def draw(seed: int, length: int = 1) -> Scenario:
  """The scenario of a seed: everything, from islands to fault rates.

  Args:
    seed: the only source of chance.
    length: so many times the steps and the faults.
  """
  rng = random.Random(f'swarm/{seed}')
  settings = _settings(rng, length)
  compute = ComputeSettings(
    step_cv=rng.choice([0.0, 0.1, 0.3]),
    speeds=tuple(
      rng.choice([1.0, 1.0, 1.0, 0.5, 3.0]) for _ in range(settings.islands)
    ),
    lag_s=rng.choice([0.0, 0.0, 0.3]),
    encode_s=rng.choice([0.0, 0.02, 0.3]),
    stage_s=rng.choice([0.0, 0.02, 0.3]),
    merge_s=rng.choice([0.001, 0.05, 1.0]),
  )
  network = NetworkSettings(
    streams=rng.random() < 0.5,
    latency_s=rng.choice([0.01, 0.1, 0.3, 1.0]),
    latency_cv=rng.choice([0.0, 0.5]),
    bandwidth=rng.choice([0.0, 0.0, 10.0 * sum(settings.sizes)]),
  )
  disk = DiskSettings(
    tape_s=rng.choice([0.002, 0.1]),
    snapshot_s=rng.choice([0.1, 2.0]),
    checkpoint_s=rng.choice([0.1, 2.0]),
    cv=rng.choice([0.0, 0.5]),
  )
  has_task = rng.random() > 0.1
  faults: tuple[plan.Fault, ...] = ()
  if rng.random() >= FAULT_FREE:
    faults = _faults(rng, settings, compute, network, has_task, length)
  return Scenario(
    seed=seed, settings=settings, compute=compute, network=network, disk=disk,
    faults=faults, jitter=rng.random() < 0.5,
    clocks_differ_s=rng.choice([0.0, 100.0]), has_task=has_task,
  )  # fmt: skip


def _settings(rng: random.Random, length: int) -> Settings:
  islands = rng.choice([1, 2, 2, 3, 3, 4, 4, 5, 6, 8, 12, 16])
  # Large runs have few fragments and short periods: no seed takes very long.
  fragments = rng.choice(
    [x for x in (1, 2, 3, 4, 6, 8) if x <= 2 or x * islands <= 32]
  )
  strides = [
    x
    for x in (1, 1, 2, 3, 5)
    if x == 1 or PERIODS * x * fragments * islands <= STEPS_MAX
  ]
  period = fragments * rng.choice(strides)
  mode = rng.choice(
    [settings_lib.FREE] * 3 + [settings_lib.LOCK_STEP, settings_lib.EACH]
  )
  overlap = rng.randrange(0, min(4, period))
  if mode == settings_lib.FREE:
    overlap = rng.choice([0, 1, 2, 3, period])
  # Of a step of an island: the step itself, its reports, and the exchange.
  events = 3.0 + 8.0 * fragments / period
  steps = max(int(EVENTS_MIN / (events * islands)), PERIODS * period)
  steps = length * (steps + rng.randrange(20))
  limits = dataclasses.replace(
    LIMITS,
    report_every_s=rng.choice([2.0, 4.0]),
    tick_s=rng.choice([0.5, 1.0, 1.5]),
    snapshot_every_s=rng.choice([0.0, 5.0, 15.0, 40.0]),
    checkpoint_every_s=rng.choice([0.0, 4.0, 10.0, 30.0]),
    donors_max=rng.choice([0, 1, 3]),
    checkpoint_age_periods=rng.choice([1.0, 4.0, 20.0]),
  )
  return Settings(
    islands=islands,
    sizes=tuple(rng.randrange(1, 9) for _ in range(fragments)),
    fingerprint='f',
    config_hash='c',
    period=period,
    overlap=overlap,
    steps=steps,
    quorum=rng.choice([0, 1, 1, 2, islands]) if islands > 1 else 1,
    mode=mode,
    adopt=rng.choice(settings_lib.ADOPTIONS),
    grace_steps_max=rng.choice([0.0, 1.0, 3.0]),
    staleness_max=rng.choice([-1, -1, 1, 3]),
    rewarm_steps=rng.choice([0, 5]),
    limits=limits,
  )


def _faults(
  rng: random.Random,
  settings: Settings,
  compute: ComputeSettings,
  network: NetworkSettings,
  has_task: bool,
  length: int,
) -> tuple[plan.Fault, ...]:
  kinds = list(plan.KINDS)
  if network.streams:
    kinds = [x for x in kinds if x not in plan.DATAGRAMS_ONLY]
  if not has_task:
    # Θ(0) that an island gave is kept by snapshots only: a syncer that dies
    # before its first one cannot come back, and is not asked to.
    kinds = [
      x for x in kinds
      if x not in (plan.CRASH_SYNCER, plan.CRASH_BOTH, *plan.OF_THE_SYNCER)
    ]  # fmt: skip
  # Some runs meet a few kinds often, others meet many kinds.
  if rng.random() < 0.5:
    kinds = rng.sample(kinds, rng.randrange(3, 9))
  steps_s = settings.steps * compute.step_s
  return plan.draw(
    rng,
    islands=settings.islands,
    until_s=0.6 * steps_s,
    count=length * rng.randrange(8, 20),
    kinds=kinds,
  )


def resized(scenario: Scenario, **changes: Any) -> Scenario:
  """With other settings, and without what is meant for absent islands."""
  settings = dataclasses.replace(scenario.settings, **changes)
  count = settings.islands
  return dataclasses.replace(
    scenario,
    settings=settings,
    faults=tuple(
      x for x in scenario.faults if x.target == plan.SYNCER or x.target < count
    ),
    compute=dataclasses.replace(
      scenario.compute, speeds=scenario.compute.speeds[:count]
    ),
  )


class Failure(NamedTuple):
  """A seed that failed. `code` is an exit code."""

  seed: int
  code: int
  checker: str
  sentence: str
  trace: str = ''  # of the program, where it crashed
  scenario: Scenario | None = None


class Outcome(NamedTuple):
  """One run."""

  events: int
  merges: int  # of the fragment with the fewest
  faults: int  # that struck
  failure: Failure | None
  planned: int = 0  # faults that the scenario has

  @property
  def is_enough(self) -> bool:
    """Whether so much happened that the run checks something."""
    few = self.planned and self.faults < FAULTS_MIN
    return self.events >= EVENTS_MIN and self.merges >= MERGES_MIN and not few


def run(
  scenario: Scenario,
  tally: Tally | None = None,
  *,
  contents: Any = None,
  observers: tuple[Any, ...] = (),
  watch: Callable[[Books], Any] | None = None,
) -> Outcome:
  """One scenario with all checkers; what is wrong is returned, not raised."""
  alive = EveryFragmentAdvances(scenario.settings, scenario.bound_s)
  alive.heal(scenario.healed_s)
  checkers = Checkers(scenario.settings, alive, tally=tally)
  watches = (*observers, checkers)
  if watch is not None:
    watches = (*watches, watch(checkers.books))
  world = None
  failure = None
  try:
    world = World(
      scenario, watches, contents, on_fault=checkers.coverage.on_fault
    )
    world.run_to_end()
    if not world.finished:
      alive.check(world, world.syncer.state)
      alive.fail(f'the run has not finished by {scenario.deadline_s:.0f} s')
  except checking.CheckFailure as e:
    failure = Failure(scenario.seed, e.code, e.checker, e.sentence)
  except InvariantError as e:
    failure = Failure(scenario.seed, checking.CORRECTNESS, 'invariants', str(e))
  except Exception as e:  # whatever it is, a seed has found it
    where = traceback.format_exc()
    failure = Failure(
      scenario.seed, checking.CRASH, type(e).__name__, str(e), where
    )
  if failure is not None:
    failure = failure._replace(scenario=scenario)
  if world is None:
    return Outcome(0, 0, 0, failure)
  merges = [0] * scenario.settings.fragments
  for line in world.tape.lines:
    if line['kind'] == 'merge':
      merges[line['fragment']] += 1
  return Outcome(
    world.events,
    min(merges),
    sum(world.faults.values()),
    failure,
    len(scenario.faults),
  )


def run_seed(seed: int, tally: Tally | None = None) -> Outcome:
  """The scenario of a seed, in timing mode.

  Where its faults have left too little to happen, a longer one of the same
  seed is run as well.
  """
  for length in LENGTHS:
    scenario = draw(seed, length)
    outcome = run(scenario, tally)
    if outcome.failure is not None or outcome.is_enough:
      break
  return outcome
