"""Makes a failing scenario smaller, as long as it fails in the same way."""

from collections.abc import Callable, Iterator
import dataclasses

from diloco_jax.simulation import swarm
from diloco_jax.simulation.scenario import Scenario

Fails = Callable[[Scenario], bool]


def shrink(scenario: Scenario, fails: Fails, tries: int = 300) -> Scenario:
  """The smallest scenario found that still fails.

  Args:
    scenario: fails.
    fails: whether a scenario fails as the first one did.
    tries: at most so many scenarios are run.
  """
  left = tries
  smaller = True
  while smaller and left > 0:
    smaller = False
    for candidate in _smaller(scenario):
      if left <= 0:
        break
      left -= 1
      if fails(candidate):
        scenario, smaller = candidate, True
        break
  return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
  """Candidates, those that take away most first."""
  yield from _fewer_faults(scenario)
  yield from _fewer_islands(scenario)
  yield from _fewer_fragments(scenario)
  settings = scenario.settings
  for share in (0.3, 0.6, 0.9):
    steps = max(settings.period, int(settings.steps * share))
    if steps < settings.steps:
      yield swarm.resized(scenario, steps=steps)
  yield from _calmer(scenario)


def _fewer_faults(scenario: Scenario) -> Iterator[Scenario]:
  faults = scenario.faults
  size = len(faults)
  while size > 1:
    size = (size + 1) // 2
    for begin in range(0, len(faults), size):
      kept = faults[:begin] + faults[begin + size :]
      yield dataclasses.replace(scenario, faults=kept)
  if len(faults) == 1:
    yield dataclasses.replace(scenario, faults=())


def _fewer_islands(scenario: Scenario) -> Iterator[Scenario]:
  islands = scenario.settings.islands
  for count in sorted({1, islands // 2, islands - 1} - {0, islands}):
    quorum = min(scenario.settings.quorum, count)
    yield swarm.resized(scenario, islands=count, quorum=quorum)


def _fewer_fragments(scenario: Scenario) -> Iterator[Scenario]:
  settings = scenario.settings
  for count in sorted({1, settings.fragments // 2} - {0, settings.fragments}):
    period = settings.stride * count
    overlap = min(settings.overlap, period - 1)
    yield swarm.resized(
      scenario, sizes=settings.sizes[:count], period=period, overlap=overlap
    )


def _calmer(scenario: Scenario) -> Iterator[Scenario]:
  """Without what is not needed for the failure."""
  compute, network = scenario.compute, scenario.network
  for candidate in (
    dataclasses.replace(scenario, jitter=False),
    dataclasses.replace(
      scenario, compute=dataclasses.replace(compute, step_cv=0.0)
    ),
    dataclasses.replace(
      scenario, compute=dataclasses.replace(compute, speeds=())
    ),
    dataclasses.replace(
      scenario, compute=dataclasses.replace(compute, lag_s=0.0)
    ),
    dataclasses.replace(
      scenario, network=dataclasses.replace(network, latency_cv=0.0)
    ),
    dataclasses.replace(
      scenario, network=dataclasses.replace(network, bandwidth=0.0)
    ),
    dataclasses.replace(
      scenario, network=dataclasses.replace(network, streams=True)
    ),
  ):
    if candidate != scenario:
      yield candidate
