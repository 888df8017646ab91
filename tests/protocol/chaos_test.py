"""Both machines under loss, duplication, cuts, kills, pauses: many seeds.

A failure names its seed and mode; `run_seed(seed, mode)` runs it again.
"""

import functools
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from diloco_jax.protocol import adoption
from diloco_jax.protocol import rounds
from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol import turn
from tests.protocol import chaos_checks
from tests.protocol import chaos_ledger
from tests.protocol import chaos_plan
from tests.protocol import chaos_world


def run_seed(seed, mode, adopt=None):
  """A whole run, with all checks. The world that it ended in."""
  plan = chaos_plan.draw(seed, mode, adopt)
  try:
    world = chaos_world.ChaosWorld(plan).run()
    chaos_checks.check_end(world)
  except Exception as error:
    error.add_note(f'run_seed({seed}, {mode!r}, {adopt!r}): {plan}')
    raise
  return world


@functools.cache
def world_of(seed):
  """The free run of a seed, run once."""
  return run_seed(seed, 'free')


class ChaosTest(parameterized.TestCase):
  @parameterized.parameters(*range(20))
  def test_free(self, seed):
    world_of(seed)

  @parameterized.parameters(*range(20))
  def test_lock_step(self, seed):
    run_seed(seed, 'lock_step')

  @parameterized.parameters(*range(26))
  def test_each(self, seed):
    run_seed(seed, 'each')


class TraceTest(absltest.TestCase):
  def test_the_same_seed_gives_the_same_trace(self):
    for seed in (1, 3):
      again = run_seed(seed, 'free')
      self.assertGreater(again.events, 500)
      self.assertEqual(again.digest, world_of(seed).digest)

  def test_another_seed_gives_another(self):
    self.assertNotEqual(world_of(3).digest, world_of(4).digest)

  def test_the_seeds_have_every_fault_in_them(self):
    worlds = [world_of(seed) for seed in range(10)]
    reasons = set()
    for world in worlds:
      reasons |= set(world.syncer.closes)
    self.assertContainsSubset(
      {s.ALL_IN, s.GRACE_OVER, s.QUORUM_TIMEOUT}, reasons
    )
    notes = {kind for world in worlds for _, kind, _ in world.notes}
    self.assertContainsSubset({'lapsed', 'readmitted', 'refused'}, notes)
    plans = [chaos_plan.draw(seed, 'free') for seed in range(24)]
    for name in ('kills', 'cuts', 'reconnects', 'pauses', 'loss', 'duplicate'):
      self.assertTrue(any(getattr(x, name) for x in plans), name)


class ChecksCanFailTest(absltest.TestCase):
  """Each rule left out is found by some of the seeds."""

  def assertFound(self, message, mode='free', adopt='rebase'):
    for seed in range(40):
      try:
        run_seed(seed, mode, adopt)
      except AssertionError as error:
        self.assertRegex(str(error), message)
        return
    self.fail('not found')

  def test_pulling_before_the_last_merge_is_adopted(self):
    with (
      mock.patch.object(rounds, '_holds_own_work', return_value=True),
      mock.patch.object(rounds.guard, '_base_problem', return_value=''),
    ):
      self.assertFound('entered|still offers')

  def test_not_taking_back_the_named_capture(self):
    with mock.patch.object(adoption, '_kept_capture', return_value=None):
      self.assertFound('still offers|counts')

  def test_settling_captures_by_any_version(self):
    with mock.patch.object(adoption, '_resolves', return_value=True):
      self.assertFound('still offers|counts')

  def test_not_repeating_what_was_lost(self):
    with mock.patch.object(turn.Turn, 'resend_after', return_value=1e9):
      self.assertFound('stuck', 'lock_step')


class LedgerTest(absltest.TestCase):
  """The account itself, shown what it must refuse."""

  def line(self, merges, number, c_steps, c_tokens):
    weight = c_tokens**2 / c_steps
    return {
      'fragment': 0, 'parent': (1, merges - 1), 'version': (1, merges),
      'inputs': [(0, 1, number, c_steps, c_tokens, weight)],
    }  # fmt: skip

  def theta(self, *captures):
    theta = chaos_ledger.Theta((1,))
    for number, steps in enumerate(captures, 1):
      theta.captures[0, 1, 0, number] = frozenset(steps)
    return theta

  def add(self, theta, merges, number):
    steps = theta.captures[0, 1, 0, number]
    tokens = sum(map(chaos_ledger.tokens_of, steps))
    theta.add(
      self.line(merges, number, len(steps), tokens), [(0, 1, 0, number)]
    )

  def test_disjoint_captures_enter(self):
    theta = self.theta({1, 2}, {3})
    self.add(theta, 1, 1)
    self.add(theta, 2, 2)
    self.assertEqual(theta.steps_in(0, 0, 1, (1, 1)), {1, 2})
    self.assertEqual(theta.steps_in(0, 0, 1, (1, 2)), {1, 2, 3})

  def test_a_step_twice_is_refused(self):
    theta = self.theta({1, 2}, {2, 3})
    self.add(theta, 1, 1)
    with self.assertRaisesRegex(AssertionError, 'step 2 .*entered'):
      self.add(theta, 2, 2)

  def test_a_version_skipped_is_refused(self):
    theta = self.theta({1})
    with self.assertRaisesRegex(AssertionError, 'parent'):
      self.add(theta, 2, 1)


if __name__ == '__main__':
  absltest.main()
