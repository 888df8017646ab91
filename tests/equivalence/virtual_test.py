"""The virtual runtime: the oracles of lock step, determinism, many islands."""

import pathlib
from unittest import mock

from absl.testing import absltest
import pytest

import diloco_jax
from diloco_jax import config as config_lib
from diloco_jax.launch import assembly
from diloco_jax.simulation import replay
from tests.equivalence import lock_step_test
from tests.equivalence import oracles
from tests.equivalence import toy


class InVirtualTime(absltest.TestCase):
  """Runs the tests of another class with simulated time."""

  def setUp(self):
    super().setUp()
    self.enter_context(
      mock.patch.object(toy, 'trained', toy.trained_in_virtual_time)
    )


@pytest.mark.slow
class PlainTrainingTest(InVirtualTime, lock_step_test.PlainTrainingTest):
  pass


@pytest.mark.slow
class DilocoTest(InVirtualTime, lock_step_test.DilocoTest):
  pass


@pytest.mark.slow
class StreamingDilocoTest(InVirtualTime, lock_step_test.StreamingDilocoTest):
  pass


@pytest.mark.slow
class RulesTest(InVirtualTime, lock_step_test.RulesTest):
  pass


@pytest.mark.slow
class DeterminismTest(InVirtualTime, lock_step_test.DeterminismTest):
  pass


class VirtualTest(absltest.TestCase):
  def test_diloco_is_what_the_oracle_says(self):
    task = toy.ToyTask()
    result = toy.trained_in_virtual_time(
      task, 'diloco', islands=3, steps=24, sync={'period': 6}
    )
    self.assertLess(
      lock_step_test.diloco_error(task, result), lock_step_test.TOLERANCE
    )

  def test_data_parallel_is_plain_training_on_the_whole_batch(self):
    task = toy.ToyTask()
    result = toy.trained_in_virtual_time(
      task, 'data_parallel', islands=2, steps=12
    )
    expected = oracles.plain(task, 12)[-1]
    self.assertLess(
      toy.difference(toy.flat(result.params), expected),
      lock_step_test.TOLERANCE,
    )

  def test_a_free_run_is_the_same_to_the_bit_and_can_be_replayed(self):
    sync = {'period': 4, 'fragments': 2}
    folder = pathlib.Path(self.create_tempdir().full_path) / 'run'
    run = toy.configured('decoupled_diloco', islands=3, steps=24, sync=sync)
    digests = set()
    for workdir in (folder, None):
      result = diloco_jax.run(toy.Evaluated(), run, 'virtual', workdir)
      digests.add(result.summary['params_digest'])
      self.assertEqual(result.summary['status'], 'ok')
      self.assertGreater(result.summary['islands_committed'], 2.5)
    self.assertLen(digests, 1)
    told = replay.replay(folder, set())
    self.assertLen(told, 4)
    self.assertTrue((folder / 'model').is_dir())

  def test_another_runtime_is_refused(self):
    with self.assertRaisesRegex(ValueError, 'threads or virtual'):
      diloco_jax.run(toy.ToyTask(), None, 'processes')


@pytest.mark.slow
class TransformerTest(absltest.TestCase):
  def test_sixteen_islands_learn(self):
    config = config_lib.default_config()
    config.islands, config.steps = 16, 60
    config.model.width, config.model.depth, config.model.heads = 32, 2, 2
    config.data.sequence, config.data.batch = 64, 4
    config.sync.fragments, config.sync.period = 4, 12
    config.metrics.tensorboard = False
    config.metrics.eval_tokens = 4096
    run = config_lib.resolve(config)
    result = diloco_jax.run(assembly.make_task(run), run, 'virtual')
    self.assertEqual(result.summary['status'], 'ok')
    self.assertGreater(result.summary['islands_committed'], 15.0)
    for index in range(16):
      rows = result.history[f'island_{index}']
      losses = [x['loss'] for x in rows if x['loss'] is not None]
      self.assertLess(losses[-1], losses[0] - 1.0)
    self.assertLess(result.summary['eval_loss'], 4.0)


if __name__ == '__main__':
  absltest.main()
