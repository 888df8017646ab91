"""Runs that have found a fault of the protocol; each passes with its fix.

A scenario of `pinned/` was shrunk from a seed of the swarm while the fault was
there; as a value it stays what it is when the swarm draws differently.
"""

import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from diloco_jax.simulation import scenario_json
from diloco_jax.simulation import swarm
from tests.simulation import watched_chaos

FOLDER = pathlib.Path(__file__).parent / 'pinned'


class PinnedTest(parameterized.TestCase):
  """`run_checked` raises CheckFailure at the first thing that is wrong."""

  @parameterized.named_parameters(
    # Admitted while the syncer recovered, it was leased merged samples again.
    ('a_lease_given_while_recovering', 2, 'free'),
    # What an earlier recovery had only renamed was counted as a lost merge.
    ('a_recovery_behind_a_recovery', 2174, 'lock_step'),
    ('a_recovery_behind_a_recovery_each', 3155, 'each'),
    # The island held a slot's version before it captured the slot.
    ('a_wait_for_what_is_held', 2141, 'lock_step'),
  )
  def test_seed(self, seed, mode):
    self.assertTrue(watched_chaos.run_checked(seed, mode).finished)

  @parameterized.parameters(*sorted(x.name for x in FOLDER.glob('*.json')))
  def test_scenario(self, name):
    text = (FOLDER / name).read_text(encoding='utf-8')
    outcome = swarm.run(scenario_json.from_json(text))
    self.assertIsNone(outcome.failure)
    self.assertGreater(outcome.events, 0)


if __name__ == '__main__':
  absltest.main()
