"""`diloco_jax.connect`: somebody else's training loop as an island."""

import pathlib
import threading

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

import diloco_jax
from diloco_jax import config as config_lib
from diloco_jax.errors import UserError
from diloco_jax.launch import assembly
from diloco_jax.launch import results
from diloco_jax.launch import role
from diloco_jax.launch.syncing import Syncer
from diloco_jax.runtime.clock import RealClock
from diloco_jax.transport import grpc

TOKEN = 'right'


class ConnectTest(absltest.TestCase):
  def start_syncer(self, steps):
    config = config_lib.default_config()
    config.islands = 1
    config.steps = steps
    config.model.width, config.model.depth, config.model.heads = 16, 1, 2
    config.sync.fragments, config.sync.period = 2, 2
    config.outer.momentum = 0.0
    config.metrics.tensorboard = False
    folder = pathlib.Path(self.create_tempdir().full_path)
    run = config_lib.resolve(config)
    task = assembly.make_task(run)
    planned = assembly.layout(run, assembly.param_shapes(task, run.seed))
    results.make_folder(planned.run, folder)
    endpoint = grpc.serve('127.0.0.1:0', TOKEN)
    syncer = Syncer(
      planned,
      task,
      workdir=folder,
      endpoint=endpoint,
      clock=RealClock(role.started_wall_s(folder)),
    )
    thread = threading.Thread(target=syncer.run)
    thread.start()
    self.addCleanup(thread.join)
    self.addCleanup(syncer.stop, 'interrupted')
    return endpoint.address, syncer, assembly.start_params(task, run.seed)

  def test_a_loop_of_three_lines_is_an_island(self):
    address, syncer, start = self.start_syncer(steps=12)
    ours = jax.tree.map(jnp.zeros_like, start)
    move = jax.jit(lambda tree: jax.tree.map(lambda x: x + 0.25, tree))

    island = diloco_jax.connect(address, ours, token=TOKEN, timeout_s=60)
    params = island.params
    # The syncer has a task, so its parameters count and not ours.
    jax.tree.map(np.testing.assert_array_equal, params, start)
    steps = 0
    while not island.should_stop:
      params = island.step(move(params), tokens=10)
      steps += 1

    self.assertEqual(island.index, 0)
    self.assertEqual(island.stop_reason, 'finished')
    self.assertGreaterEqual(steps, 12)
    self.assertEqual(island.lease.lane, 0)
    for thread in threading.enumerate():
      if thread.name == 'island':
        thread.join()
    # Every step adds 1/4 to every value: with one island, lr 1 and no
    # momentum Θ is the start plus what was merged, up to f32 rounding.
    final = syncer.final_parameters()
    moved = jax.tree.map(lambda x, y: np.asarray(x) - y, final, start)
    for leaf in jax.tree.leaves(moved):
      np.testing.assert_allclose(leaf, leaf.flat[0], atol=1e-4)
      self.assertBetween(leaf.flat[0], 0.25 * 12, 0.25 * steps + 1e-3)

  def test_another_layout_is_one_line(self):
    address, _, start = self.start_syncer(steps=4)
    other = jax.tree.map(lambda x: jnp.zeros((*x.shape, 2)), start)
    with self.assertRaisesRegex(UserError, 'model, dtypes or fragments'):
      diloco_jax.connect(address, other, token=TOKEN, timeout_s=60)

  def test_a_wrong_token_is_one_line(self):
    address, _, start = self.start_syncer(steps=4)
    ours = jax.tree.map(jnp.asarray, start)
    with self.assertRaisesRegex(UserError, 'token was refused'):
      diloco_jax.connect(address, ours, token='wrong', timeout_s=60)


if __name__ == '__main__':
  absltest.main()
