"""The verb `simulate`: mistakes, exit codes, what is printed."""

import contextlib
import io
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from diloco_jax import errors
from diloco_jax import plain_verbs
from diloco_jax.chaos import plan
from diloco_jax.simulation import command
from diloco_jax.simulation import coverage
from diloco_jax.simulation import swarm


class FlagsTest(parameterized.TestCase):
  @parameterized.parameters(
    (['--seeds=4:1'], '--seeds'),
    (['--seeds=7'], 'A:B'),
    (['--seeds=a:b'], '--seeds'),
    ([], 'neither'),
    (['--seeds=0:1', '--mode=quick'], 'timing or numeric'),
    (['--seeds=0:1', '--jobs=0'], '--jobs'),
    (['--seeds=0:1', '--what=1'], '--what'),
    (['--seeds=0:1', '--config.steps=3'], 'a seed draws everything'),
    (['--scenario=/does/not/exist'], '--scenario=/does/not/exist'),
  )
  def test_a_mistake_is_one_line(self, words, wanted):
    with self.assertRaises(errors.UserError) as caught:
      plain_verbs.simulate(words)
    self.assertLen(caught.exception.problems, 1)
    self.assertIn(wanted, str(caught.exception))

  def test_two_mistakes_are_two_lines(self):
    with self.assertRaises(errors.UserError) as caught:
      plain_verbs.simulate(['--seeds=0:1', '--scenario=/does/not/exist'])
    self.assertLen(caught.exception.problems, 2)
    self.assertIn('got both', str(caught.exception))

  def test_a_file_that_is_no_scenario(self):
    path = self.create_tempfile(content='{"seed": 1}').full_path
    with self.assertRaises(errors.UserError):
      plain_verbs.simulate([f'--scenario={path}'])


class SimulateTest(absltest.TestCase):
  def simulate(self, seeds, outcome=None):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
      stack.enter_context(contextlib.redirect_stdout(out))
      stack.enter_context(contextlib.redirect_stderr(err))
      if outcome is not None:
        stack.enter_context(mock.patch.object(swarm, 'run_seed', outcome))
      code = command.simulate(seeds)
    return code, out.getvalue(), err.getvalue()

  def test_what_was_exercised_is_a_table(self):
    code, out, err = self.simulate(range(2))
    self.assertEqual(code, 0)
    for kind in plan.KINDS:
      self.assertIn(kind, out)
    self.assertIn('rounds closed: ', out)
    self.assertIn('2/2 seeds', err)

  def test_a_hole_in_coverage_is_an_exit_code(self):
    def calm(seed, tally):
      del seed, tally
      return swarm.Outcome(swarm.EVENTS_MIN, swarm.MERGES_MIN, 0, None)

    code, out, _ = self.simulate(range(command.COVERAGE_SEEDS), calm)
    self.assertEqual(code, command.HOLE)
    self.assertIn('crash_syncer while merging', out)
    self.assertIn('refused: nonfinite', out)
    code, _, _ = self.simulate(range(10), calm)
    self.assertEqual(code, 0)

  def test_everything_that_occurred_is_no_hole(self):
    def whole(seed, tally):
      del seed
      for kind in plan.KINDS:
        for phase in coverage.PHASES:
          tally.faults[kind, phase] += 1
      tally.closes.update(coverage.CLOSES)
      tally.refusals.update(coverage.REFUSALS)
      return swarm.Outcome(swarm.EVENTS_MIN, swarm.MERGES_MIN, 0, None)

    code, _, _ = self.simulate(range(command.COVERAGE_SEEDS), whole)
    self.assertEqual(code, 0)

  def test_a_seed_in_which_too_little_happens_is_told(self):
    def short(seed, tally):
      del seed, tally
      return swarm.Outcome(swarm.EVENTS_MIN - 1, swarm.MERGES_MIN, 0, None)

    _, out, _ = self.simulate(range(command.COVERAGE_SEEDS), short)
    self.assertIn('seed 7 has 2999 events', out)


if __name__ == '__main__':
  absltest.main()
