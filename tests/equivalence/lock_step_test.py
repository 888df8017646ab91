"""Lock-step runs against loops that were written apart from the package."""

import functools
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from diloco_jax.syncer import store
from tests.equivalence import oracles
from tests.equivalence import toy

# Relative to the largest value of each tensor. A run computes in f32 and in
# another order: each of its S inner steps, adoptions and merges may round by
# 6e-8, and Adam's quotient passes on a few times the relative error of a
# gradient. For S <= 24 this came to 2e-7 to 3e-6 when it was written.
TOLERANCE = 1e-5
# What a wrong rule must differ by, for the comparison to tell it.
FAR = 100 * TOLERANCE

# DiLoCo as most tests below run it.
DILOCO = {'islands': 3, 'steps': 24}
DILOCO_PERIOD = 6


def diloco_run(task):
  return toy.trained(task, 'diloco', sync={'period': DILOCO_PERIOD}, **DILOCO)


def diloco_error(task, result):
  """How far a run is from synchronous DiLoCo."""
  expected = oracles.diloco(
    task, period=DILOCO_PERIOD, lr=0.7, momentum=0.9, **DILOCO
  )
  return toy.difference(toy.flat(result.params), expected)


def loss_of(task, leaves):
  """Mean over batches that no island trains on."""
  params = toy.nested(leaves)
  batches = [task.batch(1000, position) for position in range(20)]
  return np.mean(
    [task.loss(params, {}, batch, None, False)[0] for batch in batches]
  )


def has_learnt(task, result):
  before = loss_of(task, oracles.start(task))
  return loss_of(task, toy.flat(result.params)) < 0.7 * before


def merges(result):
  return [line for line in result.tape if line['kind'] == 'merge']


class PlainTrainingTest(parameterized.TestCase):
  @parameterized.parameters(1, 3)
  def test_one_island_with_an_outer_rate_of_one(self, fragments):
    task = toy.ToyTask()
    result = toy.trained(
      task,
      'decoupled_diloco',
      islands=1,
      steps=18,
      sync={
        'block': True, 'quorum': 1, 'overlap': 0, 'adopt': 'overwrite',
        'period': 6, 'fragments': fragments,
      },
      outer={'lr': 1.0, 'momentum': 0.0},
    )  # fmt: skip
    expected = oracles.plain(task, 18)[-1]
    self.assertLess(
      toy.difference(toy.flat(result.params), expected), TOLERANCE
    )
    self.assertEqual(result.summary['inner_steps_total'], 18)
    self.assertEqual(result.summary['tokens_lost'], 0)


class DilocoTest(absltest.TestCase):
  def test_whole_periods(self):
    task = toy.ToyTask()
    result = diloco_run(task)
    self.assertLess(diloco_error(task, result), TOLERANCE)
    self.assertLen(merges(result), 4)
    self.assertTrue(has_learnt(task, result))

  def test_a_short_last_period_is_merged_too(self):
    task = toy.ToyTask()
    result = toy.trained(
      task, 'diloco', islands=3, steps=20, sync={'period': 6}
    )
    expected = oracles.diloco(
      task, islands=3, steps=20, period=6, lr=0.7, momentum=0.9
    )
    self.assertLess(
      toy.difference(toy.flat(result.params), expected), TOLERANCE
    )
    self.assertLen(merges(result), 4)

  def test_a_merge_that_does_nothing_is_noticed(self):
    task = toy.ToyTask()
    with mock.patch.object(store.Store, 'merge', return_value=None):
      result = diloco_run(task)
    self.assertLen(merges(result), 4)
    self.assertGreater(diloco_error(task, result), FAR)
    self.assertFalse(has_learnt(task, result))


class StreamingDilocoTest(parameterized.TestCase):
  @parameterized.product(overlap=(0, 1), alpha=(0.0, 0.5, 1.0))
  def test_preset_with_two_fragments(self, overlap, alpha):
    self.check(overlap=overlap, alpha=alpha, steps=21)

  @parameterized.parameters(18, 19, 20)
  def test_wherever_the_run_ends(self, steps):
    self.check(overlap=2, alpha=0.5, steps=steps)

  def check(self, *, overlap, alpha, steps):
    task = toy.ToyTask()
    result = toy.trained(
      task,
      'streaming_diloco',
      islands=2,
      steps=steps,
      sync={
        'period': 6, 'fragments': 2, 'overlap': overlap, 'alpha': alpha,
      },
    )  # fmt: skip
    expected = oracles.streaming(
      task,
      islands=2,
      steps=steps,
      period=6,
      fragments=2,
      overlap=overlap,
      adopt=oracles.blend(alpha),
      forgets=alpha == 0,
      lr=0.4,
      momentum=0.9,
    )
    self.assertLess(
      toy.difference(toy.flat(result.params), expected), TOLERANCE
    )


class RulesTest(parameterized.TestCase):
  """One setting away from Streaming DiLoCo, and its oracle likewise."""

  def test_radial_directional_averaging(self):
    task = toy.ToyTask()
    params = self.trained(task, merge='rda')
    expect = functools.partial(self.expected, task)
    self.assertLess(
      toy.difference(params, expect(merge=oracles.rda)), TOLERANCE
    )
    self.assertGreater(toy.difference(params, expect()), FAR)

  def test_rebase(self):
    task = toy.ToyTask()
    params = self.trained(task, adopt='rebase')
    expect = functools.partial(self.expected, task)
    self.assertLess(
      toy.difference(params, expect(adopt=oracles.rebase)), TOLERANCE
    )
    self.assertGreater(toy.difference(params, expect()), FAR)

  @parameterized.parameters('mean', 'rda')
  def test_islands_with_other_numbers_of_tokens(self, rule):
    task = toy.ToyTask(uneven=True)
    merge = {'mean': oracles.mean, 'rda': oracles.rda}[rule]

    def unweighted(name, vectors, weights):
      return merge(name, vectors, [1.0] * len(weights))

    params = self.trained(task, merge=rule)
    expect = functools.partial(self.expected, task)
    self.assertLess(toy.difference(params, expect(merge=merge)), TOLERANCE)
    self.assertGreater(toy.difference(params, expect(merge=unweighted)), FAR)

  def trained(self, task, **sync):
    layout = {'period': 4, 'fragments': 2, 'overlap': 1}
    result = toy.trained(
      task,
      'streaming_diloco',
      islands=3,
      steps=15,
      sync={**layout, **sync},
    )
    return toy.flat(result.params)

  def expected(self, task, adopt=None, merge=oracles.mean):
    return oracles.streaming(
      task,
      islands=3,
      steps=15,
      period=4,
      fragments=2,
      overlap=1,
      adopt=adopt or oracles.blend(0.5),
      lr=0.4,
      momentum=0.9,
      merge=merge,
    )


class DeterminismTest(absltest.TestCase):
  def test_the_same_run_twice_is_the_same_bit_for_bit(self):
    digests = {}
    for seed in range(3):
      for _ in range(2):
        result = toy.trained(
          toy.ToyTask(seed),
          'streaming_diloco',
          islands=3,
          steps=15,
          seed=seed,
          sync={'period': 4, 'fragments': 2, 'overlap': 1},
        )
        digest = result.summary['params_digest']
        self.assertRegex(digest, '^[0-9a-f]{32}$')
        self.assertEqual(digests.setdefault(seed, digest), digest)
    self.assertLen(set(digests.values()), 3)


if __name__ == '__main__':
  absltest.main()
