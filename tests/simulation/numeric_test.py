"""Numeric mode: arrays of production in the simulated world."""

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from diloco_jax import algorithm as A
from diloco_jax.simulation import numeric
from diloco_jax.simulation import swarm
from diloco_jax.simulation.trace import Trace

SEEDS = 10
SLOW_SEEDS = 50


def traced(seed):
  trace = Trace()
  scenario = numeric.draw(seed)
  outcome = swarm.run(
    scenario, contents=numeric.ToyContents(scenario), observers=(trace,)
  )
  return trace.digest, outcome


class NumericTest(parameterized.TestCase):
  @parameterized.parameters(*range(SEEDS))
  def test_seed_passes(self, seed):
    self.assertIsNone(numeric.run_seed(seed).failure)

  def test_a_seed_is_one_run_to_the_bit(self):
    # The trace has the digest of every merge.
    digest, outcome = traced(3)
    self.assertGreater(outcome.merges, 0)
    self.assertEqual(traced(3)[0], digest)

  def test_every_contribution_is_checked(self):
    checked = []
    real = numeric.ValuesAreTrue._compare

    def count(self, *args):
      checked.append(args)
      real(self, *args)

    with mock.patch.object(numeric.ValuesAreTrue, '_compare', count):
      seed = next(
        x for x in range(50) if numeric.draw(x).settings.adopt == 'rebase'
      )
      numeric.run_seed(seed)
    self.assertGreater(len(checked), 20)

  @parameterized.parameters(0.0, 2.0)
  def test_a_wrong_shift_is_found(self, share):
    # Of the own steps in a version, none or twice as many are taken back.
    real = A.rebase_shift

    def wrong(theta, anchor, sent):
      if sent is not None:
        sent = {name: share * x for name, x in sent.items()}
      return real(theta, anchor, sent)

    with mock.patch.object(A, 'rebase_shift', wrong):
      outcomes = map(numeric.run_seed, range(SEEDS))
      found = {x.failure.checker for x in outcomes if x.failure is not None}
    self.assertIn('ValuesAreTrue', found)


@pytest.mark.slow
class SlowNumericTest(absltest.TestCase):
  def test_fifty_seeds_pass(self):
    for seed in range(SEEDS, SEEDS + SLOW_SEEDS):
      self.assertIsNone(numeric.run_seed(seed).failure, seed)


if __name__ == '__main__':
  absltest.main()
