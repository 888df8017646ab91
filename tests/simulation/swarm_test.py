"""The swarm: seeds are runs, runs are deterministic, faults strike."""

import collections
import os
import subprocess
import sys

from absl.testing import absltest
import pytest

from diloco_jax.chaos import plan
from diloco_jax.simulation import command
from diloco_jax.simulation import coverage
from diloco_jax.simulation import scenario_json
from diloco_jax.simulation import swarm
from diloco_jax.simulation.trace import Trace

SEEDS = 200
SLOW_SEEDS = 1000


def trace_of(seed):
  trace = Trace()
  outcome = swarm.run(swarm.draw(seed), observers=(trace,))
  return trace.digest, outcome


class SwarmTest(absltest.TestCase):
  def test_seeds_pass_and_enough_happens(self):
    seeds = 0
    for part in command.parts(command.TIMING, range(SEEDS), os.cpu_count()):
      self.assertEqual(part.failures, ())
      self.assertEqual(part.too_few, ())
      seeds += part.seeds
    self.assertEqual(seeds, SEEDS)

  def test_a_seed_is_one_run(self):
    for seed in (1, 2, 3):
      digest, outcome = trace_of(seed)
      again, _ = trace_of(seed)
      self.assertEqual(digest, again)
      self.assertGreaterEqual(outcome.events, swarm.EVENTS_MIN)
    self.assertNotEqual(trace_of(1)[0], trace_of(2)[0])

  def test_hashes_of_strings_change_nothing(self):
    code = (
      'from tests.simulation import swarm_test;'
      'print([swarm_test.trace_of(x)[0] for x in (4, 5, 6)])'
    )
    told = {
      subprocess.run(
        [sys.executable, '-c', code],
        env={**os.environ, 'PYTHONHASHSEED': seed},
        capture_output=True,
        text=True,
        check=True,
      ).stdout
      for seed in ('0', '1')
    }
    self.assertLen(told, 1)

  def test_few_seeds_are_fault_free_and_every_kind_is_drawn(self):
    kinds = collections.Counter()
    free = 0
    for seed in range(2000):
      faults = swarm.draw(seed).faults
      free += not faults
      kinds.update({x.kind for x in faults})
    self.assertBetween(free, 1, 100)
    self.assertSameElements(kinds, plan.KINDS)

  def test_a_scenario_survives_json(self):
    for seed in range(50):
      scenario = swarm.draw(seed)
      again = scenario_json.from_json(scenario_json.to_json(scenario))
      self.assertEqual(again, scenario)


@pytest.mark.slow
class SlowSwarmTest(absltest.TestCase):
  def test_a_thousand_seeds_pass(self):
    tally = coverage.Tally()
    for part in command.parts(
      command.TIMING, range(2000, 2000 + SLOW_SEEDS), os.cpu_count() or 1
    ):
      self.assertEqual(part.failures, ())
      tally.add(part.tally)
    for kind in plan.KINDS:
      self.assertGreater(tally.kinds[kind], 0, kind)


if __name__ == '__main__':
  absltest.main()
