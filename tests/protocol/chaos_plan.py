"""What one seed means: settings, speeds and faults, drawn at random."""

import dataclasses
import random

from diloco_jax.protocol import settings as settings_lib
from diloco_jax.protocol.settings import Limits
from diloco_jax.protocol.settings import Settings


@dataclasses.dataclass(frozen=True)
class Plan:
  """Times in seconds of virtual time."""

  seed: int
  settings: Settings
  speeds: tuple[float, ...]
  step_cv: float = 0.0
  finish_lag_s: float = 0.0  # a step's end is seen this long after its boundary
  latency_s: float = 0.1
  tail: float = 0.0  # share of messages that take many latencies
  streams: bool = True  # in order, lost only with their connection
  loss: float = 0.0
  duplicate: float = 0.0
  corrupt: float = 0.0  # share of received fragments with a wrong digest
  sick: float = 0.0  # share of contributions that are not finite
  merge_s: float = 0.01
  until: float = 0.0  # no fault after this
  kills: tuple[tuple[float, int, float, bool, bool], ...] = ()
  cuts: tuple[tuple[float, float, int, str], ...] = ()
  reconnects: tuple[tuple[float, int, float], ...] = ()
  pauses: tuple[tuple[float, int, float], ...] = ()

  @property
  def deadline(self) -> float:
    """By then the run has finished, or is stuck."""
    steps = self.settings.steps / min(self.speeds)
    return self.until + 400 + 12 * steps


# A lost message must not cost a whole start or compile limit: these are far
# beyond every deadline, so that a run that waits for one of them is stuck.
LIMITS = Limits(
  compiling_s=1e5, restoring_s=1e5, saving_s=1e5, evaluating_s=1e5,
  start_timeout_s=40.0, quarantine_s=20.0, quorum_timeout_floor_s=6.0,
)  # fmt: skip


def _settings(rng: random.Random, mode: str, adopt: str) -> Settings:
  fragments = rng.choice([1, 2, 3, 4, 6])
  period = fragments * rng.choice([1, 1, 2, 3, 5])
  overlap = rng.randrange(0, min(4, period))
  if mode == settings_lib.FREE:
    overlap = rng.choice([0, 1, 2, 3, period])
  islands = rng.choice([1, 2, 2, 3, 4, 5, 8])
  return Settings(
    islands=islands,
    sizes=tuple(rng.randrange(1, 9) for _ in range(fragments)),
    fingerprint='f',
    config_hash='c',
    period=period,
    overlap=overlap,
    steps=period * rng.randrange(4, 12),
    quorum=rng.choice([0, 1, 1, 2, islands]),
    mode=mode,
    adopt=adopt,
    grace_steps_max=rng.choice([0.0, 1.0]),
    staleness_max=rng.choice([-1, -1, 2]),
    limits=LIMITS,
  )


def draw(seed: int, mode: str | None = None, adopt: str | None = None) -> Plan:
  """The plan of a seed; mode and adopt can be held fixed."""
  rng = random.Random(f'plan/{seed}')
  mode = mode or rng.choice(settings_lib.MODES)
  adopt = adopt or rng.choice(settings_lib.ADOPTIONS)
  settings = _settings(rng, mode, adopt)
  islands = settings.islands
  until = rng.uniform(20, 20 + settings.steps)
  streams = rng.random() < 0.5

  def some(make, most=3):
    return tuple(make() for _ in range(rng.randrange(most + 1)))

  def when():
    return rng.uniform(0.5, until)

  def cut():
    start = when()
    way = rng.choice(['up', 'down', 'both'])
    end = min(until, start + rng.choice([1.0, 5.0, 30.0]))
    return start, end, rng.randrange(islands), way

  calm = rng.random() < 0.15
  kills = some(
    lambda: (
      when(), rng.randrange(islands), rng.choice([0.5, 4.0, 25.0]),
      rng.random() < 0.25, rng.random() < 0.5,
    )
  )  # fmt: skip
  reconnects = some(
    lambda: (when(), rng.randrange(islands), rng.choice([0.1, 2.0, 20.0]))
  )
  pauses = some(
    lambda: (when(), rng.randrange(islands), rng.choice([1.0, 6.0, 25.0]))
  )
  cuts = some(cut)
  return Plan(
    seed=seed,
    settings=settings,
    speeds=tuple(rng.choice([1.0, 1.0, 1.0, 0.5, 4.0]) for _ in range(islands)),
    step_cv=rng.choice([0.0, 0.3]),
    finish_lag_s=rng.choice([0.0, 0.0, 0.2]),
    latency_s=rng.choice([0.01, 0.1, 0.5, 1.5]),
    tail=0.0 if calm else rng.choice([0.0, 0.02, 0.1]),
    streams=streams,
    loss=0.0 if calm or streams else rng.choice([0.0, 0.02, 0.15]),
    duplicate=0.0 if calm or streams else rng.choice([0.0, 0.05, 0.2]),
    corrupt=0.0 if calm else rng.choice([0.0, 0.05]),
    sick=0.0 if calm else rng.choice([0.0, 0.05]),
    merge_s=rng.choice([0.001, 0.2, 2.0]),
    until=until,
    kills=() if calm else kills,
    cuts=() if calm else cuts,
    reconnects=() if calm else reconnects,
    pauses=() if calm else pauses,
  )
