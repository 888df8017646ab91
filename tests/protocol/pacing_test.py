"""Rule 5.1: the period is H for the median island, whoever is there."""

import statistics
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from diloco_jax.protocol import schedule
from diloco_jax.protocol.settings import Settings
from diloco_jax.simulation.compute import ComputeSettings
from diloco_jax.simulation.network import NetworkSettings
from diloco_jax.simulation.scenario import Scenario
from diloco_jax.simulation.world import World

PERIOD = 24


def world(
  islands, fragments, *, mode='free', steps=168, seed=0, overlap=2,
  latency_s=0.05, **compute,
):  # fmt: skip
  """A world of islands that start at different moments of a step."""
  settings = Settings(
    islands=islands,
    sizes=(1,) * fragments,
    fingerprint='f',
    config_hash='c',
    period=PERIOD,
    overlap=overlap,
    steps=steps,
    mode=mode,
  )
  scenario = Scenario(
    seed=seed,
    settings=settings,
    compute=ComputeSettings(**compute),
    network=NetworkSettings(latency_s=latency_s),
  )
  return World(scenario)


def merges(tape, since=0.0):
  """(island, fragment) -> its step at each merge, told by the tape alone."""
  result = {}
  for line in tape.lines:
    if line['kind'] != 'merge' or line['drain'] or line['t_s'] < since:
      continue
    for island, step in line['steps']:
      result.setdefault((island, line['fragment']), []).append(step)
  return result


def periods(tape, since=0.0):
  """Island -> its mean inner steps between merges of a fragment."""
  spans = {}
  for (island, _), steps in merges(tape, since).items():
    if len(steps) > 1:
      spans.setdefault(island, []).append(
        (steps[-1] - steps[0]) / (len(steps) - 1)
      )
  return {x: statistics.mean(y) for x, y in sorted(spans.items())}


def median_period(tape, since=0.0, islands=None):
  """÷ H, of the median island."""
  found = periods(tape, since)
  found = {x: y for x, y in found.items() if islands is None or x in islands}
  return statistics.median(found.values()) / PERIOD


class FreeRunningTest(parameterized.TestCase):
  def assertPeriodIsKept(self, ratio):
    self.assertBetween(ratio, 0.9, 1.1)

  @parameterized.parameters((1, 24), (2, 12), (3, 24), (4, 12), (8, 12))
  def test_noisy_islands(self, islands, fragments):
    w = world(islands, fragments, step_cv=0.3)
    w.run(2000.0)
    self.assertTrue(w.finished)
    self.assertLen(periods(w.tape), islands)
    self.assertPeriodIsKept(median_period(w.tape))

  def test_sixteen_islands(self):
    w = world(16, 12, step_cv=0.3, steps=192)
    w.run(2000.0)
    self.assertTrue(w.finished)
    self.assertPeriodIsKept(median_period(w.tape))

  @parameterized.parameters((3, 24), (5, 12))
  def test_one_island_20_times_as_fast(self, islands, fragments):
    w = world(islands, fragments, step_cv=0.3, speeds=(20.0,), steps=120)
    w.run(2000.0)
    self.assertTrue(w.finished)
    self.assertPeriodIsKept(median_period(w.tape))
    self.assertGreater(periods(w.tape)[0], 10 * PERIOD)

  def test_of_two_islands_the_slower_paces(self):
    w = world(2, 12, step_cv=0.3, speeds=(4.0,), steps=192)
    w.run(2000.0)
    self.assertPeriodIsKept(median_period(w.tape, islands=(1,)))

  @parameterized.parameters((4, 24), (8, 12))
  def test_half_of_them_die(self, islands, fragments):
    w = world(islands, fragments, step_cv=0.3, steps=2000)
    w.run(100.0)
    for index in range(islands // 2):
      w.islands[index].die()
    w.run(260.0)
    alive = range(islands // 2, islands)
    # A window with the death in it: the rounds go on.
    self.assertPeriodIsKept(median_period(w.tape, 90.0, alive))
    # And one after it.
    self.assertPeriodIsKept(median_period(w.tape, 150.0, alive))

  def test_the_fast_ones_die(self):
    # Without a bound on the debt no round opens for 20 x 100 step times.
    w = world(3, 12, step_cv=0.3, steps=2000, speeds=(20.0, 20.0))
    w.run(100.0)
    w.islands[0].die()
    w.islands[1].die()
    w.run(260.0)
    self.assertPeriodIsKept(median_period(w.tape, 160.0, (2,)))

  @parameterized.parameters((1, 24), (2, 12), (4, 24))
  def test_latency_of_half_a_step(self, islands, fragments):
    w = world(islands, fragments, step_cv=0.3, latency_s=0.5)
    w.run(2000.0)
    self.assertTrue(w.finished)
    self.assertPeriodIsKept(median_period(w.tape))

  def test_rounds_too_long_for_the_period_are_warned_of_once(self):
    w = world(2, 24, latency_s=2.0, overlap=1, steps=144)
    w.run(5000.0)
    warnings = [x for x in w.tape.lines if x['kind'] == 'pace_warning']
    self.assertLen(warnings, 1)
    self.assertGreater(median_period(w.tape), 2)
    # The overlap that it names does.
    enough = warnings[0]['overlap_that_would_do']
    w = world(2, 24, latency_s=2.0, overlap=enough)
    w.run(5000.0)
    self.assertPeriodIsKept(median_period(w.tape))


class LockStepTest(parameterized.TestCase):
  @parameterized.product(fragments=(12, 24), overlap=(0, 2))
  def test_period_is_exact(self, fragments, overlap):
    # Up to the overlap: a merge is seen while islands step on to due + tau.
    w = world(
      3, fragments, mode='lock_step', overlap=overlap, step_cv=0.3,
      latency_s=0.5, speeds=(1.0, 3.0), steps=120,
    )  # fmt: skip
    w.run(2000.0)
    self.assertTrue(w.finished)
    for island, period in periods(w.tape).items():
      count = max(len(x) for x in merges(w.tape).values()) - 1
      self.assertAlmostEqual(
        period, PERIOD, delta=overlap / count + 1e-9, msg=f'island {island}'
      )


class RuleCanFailTest(parameterized.TestCase):
  """The literal alternatives miss the period where the rule keeps it."""

  @parameterized.product(
    islands=(3, 8),
    charge=(
      lambda credits, n: credits - n if credits >= n else credits,
      lambda credits, n: max(0, credits - n),
    ),
  )
  def test_holders_only_or_no_debt(self, islands, charge):
    with mock.patch.object(schedule, 'charge', charge):
      w = world(islands, 24, step_cv=0.3, steps=144)
      w.run(2000.0)
    self.assertLess(median_period(w.tape), 0.9)

  def test_unbounded_debt(self):
    def unbounded(credits, n):
      return min(n, credits - n)

    with mock.patch.object(schedule, 'charge', unbounded):
      w = world(3, 12, step_cv=0.3, steps=2000, speeds=(20.0, 20.0))
      w.run(100.0)
      w.islands[0].die()
      w.islands[1].die()
      w.run(260.0)
    self.assertEmpty(merges(w.tape, 160.0))


if __name__ == '__main__':
  absltest.main()
