"""One island on several devices trains as on one.

Four devices are forced on the host, in a process of its own, as their number
is settled when jax starts. What this proves: meshes of data, fsdp and tensor
axes give the losses of one device over five steps, in float32 and up to the
order of sums, on one of them with the batch taken in parts; parameters and
moments lie sharded and stay where they are; the step is compiled once. What
it does not: anything of speed or memory, of the collectives of real
accelerators, of several processes in one island, or of an expert axis larger
than one.
"""

import json
import os
import pathlib
import subprocess
import sys

from absl.testing import absltest
import numpy as np

COMPANION = pathlib.Path(__file__).with_name('devices_companion.py')
ROOT = pathlib.Path(__file__).parents[2]


class DevicesTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    path = os.pathsep.join(
      filter(None, [str(ROOT), os.environ.get('PYTHONPATH', '')])
    )
    done = subprocess.run(
      [sys.executable, '-W', 'error', str(COMPANION)],
      env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': path},
      capture_output=True,
      text=True,
      check=False,
      timeout=300,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    cls.one = results.pop('one')
    cls.results = results

  def test_losses_are_those_of_one_device(self):
    losses = self.one['losses']
    self.assertLen(losses, 5)
    # Training does something, so that equal losses say something.
    self.assertGreater(np.ptp(losses), 0.01)
    for name, result in self.results.items():
      with self.subTest(name):
        np.testing.assert_allclose(result['losses'], losses, rtol=2e-4)
        np.testing.assert_allclose(
          result['evaluated'], self.one['evaluated'], rtol=5e-4
        )

  def test_parameters_are_sharded(self):
    shards = {
      name: (r['query_shard'], r['query_devices'])
      for name, r in self.results.items()
    }
    self.assertEqual(
      shards,
      {
        'fsdp=2 tensor=2': ([8, 8], 4),
        'fsdp=4': ([4, 16], 4),
        'tensor=4': ([16, 4], 4),
        'data=2 fsdp=2': ([8, 16], 4),
      },
    )

  def test_shardings_stay_and_moments_lie_as_their_parameters(self):
    for name, result in self.results.items():
      with self.subTest(name):
        self.assertTrue(result['moments'])
        self.assertTrue(result['still'])
        self.assertTrue(result['put'])

  def test_only_a_tensor_axis_exchanges_activations(self):
    """Parameters are gathered along fsdp; a batch stays where it is."""
    for name, result in self.results.items():
      with self.subTest(name):
        self.assertEqual(bool(result['exchanged']), 'tensor' in name)

  def test_the_step_is_compiled_once(self):
    for name, result in self.results.items():
      self.assertEqual(result['compiles'], [1, 0, 0, 0, 0], name)


if __name__ == '__main__':
  absltest.main()
