"""A failing seed is made smaller, and still fails."""

import contextlib
import io
import pathlib
import sys

from absl.testing import absltest

from diloco_jax.simulation import command
from diloco_jax.simulation import scenario_json
from diloco_jax.simulation import swarm
from diloco_jax.simulation.shrink import shrink

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / 'experiments' / 'simulation'))

import planted  # noqa: E402

BUG = planted.BUGS['broadcast_before_the_line_is_durable']


def first_failure():
  for seed in range(50):
    outcome = swarm.run_seed(seed)
    if outcome.failure is not None:
      return seed, outcome.failure
  raise AssertionError('the planted bug was not found')


class ShrinkTest(absltest.TestCase):
  def test_a_smaller_scenario_fails_alike(self):
    with BUG():
      seed, failure = first_failure()
      scenario = swarm.draw(seed)

      def fails(candidate):
        found = swarm.run(candidate).failure
        return found is not None and found.checker == failure.checker

      small = shrink(scenario, fails)
      self.assertTrue(fails(small))
    self.assertLess(len(small.faults), max(1, len(scenario.faults)))
    self.assertLessEqual(small.settings.islands, 2)
    self.assertEqual(small.settings.fragments, 1)
    self.assertIsNone(swarm.run(small).failure)

  def test_a_failure_tells_how_to_run_it_again(self):
    out = io.StringIO()
    with BUG(), contextlib.redirect_stdout(out):
      seed, failure = first_failure()
      code = command.simulate(range(seed, seed + 1))
    self.assertEqual(code, failure.code)
    self.assertIn(f'--seeds={seed}:{seed + 1} --mode=timing', out.getvalue())
    lines = [x for x in out.getvalue().splitlines() if x.startswith('It is {')]
    scenario = scenario_json.from_json(lines[0].removeprefix('It is '))
    out = io.StringIO()
    with BUG(), contextlib.redirect_stdout(out):
      self.assertEqual(command.rerun(scenario), failure.code)
    with contextlib.redirect_stdout(out):
      self.assertEqual(command.rerun(scenario), 0)


if __name__ == '__main__':
  absltest.main()
