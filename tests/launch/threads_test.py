"""Whole runs in threads: what `diloco_jax.run` gives."""

import contextlib
import itertools
import threading

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

import diloco_jax
from diloco_jax import config as config_lib
from diloco_jax.launch import threads


class LineTask:
  """Least squares on a line: three numbers to find, one of them unused."""

  def init(self, key):
    del key
    return {
      'slope': jnp.zeros((2,)),
      'offset': jnp.zeros((1,)),
      'unused': jnp.ones((3,)),
    }, {}

  def loss(self, params, state, batch, key, train):
    del key, train
    predicted = batch['x'] @ params['slope'] + params['offset']
    return jnp.mean((predicted - batch['y']) ** 2), (state, {})

  def batches(self, split, lease):
    seed = 7 if split == 'test' else lease.lane
    rng = np.random.default_rng(seed)
    count = 2 if split == 'test' else 10**9
    for _ in range(count):
      x = rng.normal(size=(8, 2)).astype(np.float32)
      y = x @ np.array([1.0, -2.0], np.float32) + 0.5
      yield {'x': x, 'y': y}


def make_config(**changes):
  config = config_lib.default_config()
  config.islands = 2
  config.steps = 60
  config.sync.fragments = 3
  config.sync.period = 6
  config.sync.quorum = 2
  # Rounds must fit between steps, as they do with real models.
  config.launch.step_floor_ms = 10.0
  config.inner.lr = 0.1
  config.inner.warmup_steps = 1
  config.inner.weight_decay = 0.0
  config.metrics.eval_every_s = 0.0
  config.metrics.tensorboard = False
  for path, value in changes.items():
    config.update_from_flattened_dict({path.replace('__', '.'): value})
  return config


class MeetingTask(LineTask):
  """Notes whether two islands are ever at their first batch together."""

  def __init__(self):
    self.met = False
    self._barrier = threading.Barrier(2)
    self._seen = threading.local()

  def batches(self, split, lease):
    if split == 'train' and not hasattr(self._seen, 'first'):
      self._seen.first = True  # the one that the step is compiled for
      with contextlib.suppress(threading.BrokenBarrierError):
        self._barrier.wait(0.5)
        self.met = True
    return super().batches(split, lease)


class CompilingTest(absltest.TestCase):
  def test_islands_compile_one_after_the_other(self):
    task = MeetingTask()
    diloco_jax.run(task, make_config(steps=6), runtime='threads')
    self.assertFalse(task.met)


class RunTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.result = diloco_jax.run(LineTask(), make_config(), runtime='threads')

  def test_it_learns(self):
    np.testing.assert_allclose(
      self.result.params['slope'], [1.0, -2.0], atol=0.05
    )
    self.assertLess(self.result.summary['eval_loss'], 0.01)

  def test_the_summary_accounts_for_every_token(self):
    summary = self.result.summary
    self.assertEqual(summary['status'], 'ok')
    self.assertGreaterEqual(summary['merges'], 30)
    self.assertAlmostEqual(
      summary['tokens_trained'],
      summary['tokens_merged']
      + summary['tokens_lost']
      + summary['tokens_pending'],
      delta=1,
    )
    self.assertEqual(summary['tokens_lost'], 0)  # rebase loses none

  def test_every_round_closed_with_a_reason(self):
    closed = [x for x in self.result.tape if x['kind'] == 'round_closed']
    merges = [x for x in self.result.tape if x['kind'] == 'merge']
    self.assertLen(closed, len(merges) + sum(
      x['reason'] == 'empty' for x in closed))  # fmt: skip
    for line in closed:
      named = {island for island, _ in line['left_out']}
      self.assertLen(named, line['members'] - line['contributed'])

  def test_the_parameters_are_those_of_the_last_merges(self):
    last = {}
    for line in self.result.tape:
      if line['kind'] == 'merge':
        last[line['fragment']] = line['digest_f32']
    self.assertLen(last, 3)
    finished = [x for x in self.result.tape if x['kind'] == 'finished']
    self.assertEqual(
      finished[-1]['params_digest'], self.result.summary['params_digest']
    )

  def test_history_has_a_row_for_at_least_every_ten_steps(self):
    for name in ('island_0', 'island_1'):
      rows = self.result.history[name]
      steps = [0, *(row['step'] for row in rows if row['steps'])]
      gaps = [b - a for a, b in itertools.pairwise(steps)]
      self.assertLessEqual(max(gaps), 10)


class StopTest(absltest.TestCase):
  def test_an_island_that_leaves_does_not_stop_the_others(self):
    task = LineTask()
    seen = []
    original = threads.ThreadRun

    class Stopping(original):
      """Makes island 1 leave as soon as three merges are there."""

      def _sync(self):
        self.stop_island(1)
        seen.append(self)
        super()._sync()

    threads.ThreadRun = Stopping
    self.addCleanup(setattr, threads, 'ThreadRun', original)
    result = threads.run_in_threads(
      task, config_lib.resolve(make_config()), evaluate=False
    )
    self.assertEqual(result.summary['status'], 'ok')
    self.assertGreaterEqual(result.summary['merges'], 30)
    left = [x for x in result.tape if x['kind'] == 'left']
    self.assertIn('killed', [x['reason'] for x in left])


class DeviceTest(absltest.TestCase):
  def test_islands_share_a_device_where_there_are_too_few(self):
    parts = threads.device_parts(jax.local_device_count() + 1)
    self.assertEqual({len(part) for part in parts}, {1})


if __name__ == '__main__':
  absltest.main()
