"""Tapes of a run go through their machines again; every change is named."""

import contextlib
import io
import json
import pathlib
import shutil
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from diloco_jax import config as config_lib
from diloco_jax import errors
from diloco_jax import plain_verbs
from diloco_jax.launch import assembly
from diloco_jax.launch import threads
from diloco_jax.simulation import replay
from diloco_jax.simulation import replaying
from diloco_jax.storage import payloads
from tests.equivalence import toy


def configured(seed=0):
  sync = {'period': 4, 'fragments': 2}
  return toy.configured(
    'decoupled_diloco', islands=2, steps=24, sync=sync, seed=seed
  )


class ReplayTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.made = pathlib.Path(tempfile.mkdtemp()) / 'replayed'
    run = configured()
    threads.run_in_threads(toy.ToyTask(), run, cls.made, evaluate=False)
    cls.addClassCleanup(shutil.rmtree, cls.made.parent)

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path) / 'run'
    shutil.copytree(self.made, self.folder)

  def tape(self, name='syncer'):
    path = self.folder / 'tape' / f'{name}.jsonl'
    return path, path.read_text().splitlines()

  def difference(self):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      code = replaying.main(self.folder)
    self.assertEqual(code, replaying.DIFFERENT, out.getvalue())
    return out.getvalue()

  def test_a_run_is_the_same(self):
    told = replay.replay(self.folder, set())
    self.assertEqual(
      [x.path.stem for x in told], ['syncer', 'island_0', 'island_1']
    )
    self.assertGreater(told[0].events, 100)
    self.assertGreater(len(told[0].got), 10)
    self.assertTrue(all(x.ended for x in told))

  @parameterized.product(
    name=('syncer', 'island_1'), share=(0.0, 0.2, 0.5, 0.8, 1.0)
  )
  def test_a_removed_line_is_named(self, name, share):
    path, lines = self.tape(name)
    number = round(share * (len(lines) - 1))
    del lines[number]
    path.write_text('\n'.join(lines) + '\n')
    self.assertIn(f'{path}:{number + 1}: ', self.difference())

  @parameterized.product(name=('syncer', 'island_0'), share=(0.1, 0.4, 0.9))
  def test_an_altered_line_is_named(self, name, share):
    path, lines = self.tape(name)
    number = round(share * (len(lines) - 1))
    line = json.loads(lines[number])
    line['t_s'] += 0.25
    lines[number] = json.dumps(line)
    path.write_text('\n'.join(lines) + '\n')
    told = self.difference()
    self.assertIn(f'{path}:{number + 1}: got', told)
    self.assertIn('expected', told)

  def test_what_an_event_says_of_nothing_else_counts_too(self):
    path, lines = self.tape()
    number = next(k for k, x in enumerate(lines) if '"held_s":' in x)
    line = json.loads(lines[number])
    line['event']['message']['held_s'] += 1.0
    lines[number] = json.dumps(line)
    path.write_text('\n'.join(lines) + '\n')
    self.assertIn(f'{path}:{number + 1}: got', self.difference())

  def test_a_tape_of_another_run_does_not_fit(self):
    # It is whole in itself; the syncer has merged other values.
    other = pathlib.Path(self.create_tempdir().full_path) / 'other'
    run = configured(seed=1)
    threads.run_in_threads(toy.ToyTask(1), run, other, evaluate=False)
    shutil.copy(
      other / 'tape' / 'island_1.jsonl', self.folder / 'tape' / 'island_1.jsonl'
    )
    self.assertIn('island_1.jsonl:', self.difference())

  def test_a_killed_process_may_end_anywhere(self):
    path, lines = self.tape('island_1')
    path.write_text('\n'.join(lines[: len(lines) // 2]) + '\n{"t_s":')
    with self.assertRaises(replay.DifferenceError):
      replay.replay(self.folder, set())
    told = replay.replay(self.folder, {'island_1'})
    self.assertEqual([x.ended for x in told], [True, True, False])

  def test_kept_arrays_make_theta_again(self):
    config = config_lib.default_config()
    config.islands, config.steps = 2, 12
    config.model.width, config.model.depth, config.model.heads = 16, 1, 2
    config.data.sequence, config.data.batch = 16, 2
    config.sync.fragments, config.sync.period = 2, 4
    config.metrics.tensorboard = False
    config.metrics.tape_payloads = True
    run = config_lib.resolve(config)
    folder = pathlib.Path(self.create_tempdir().full_path) / 'kept'
    threads.run_in_threads(assembly.make_task(run), run, folder, evaluate=False)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      self.assertEqual(plain_verbs.replay([f'--workdir={folder}']), 0)
    self.assertRegex(out.getvalue(), r'[1-9]\d* merges done again')
    kept = next((folder / payloads.FOLDER).glob('merge_1_1*.npz'))
    arrays = dict(np.load(kept))
    name = next(iter(arrays))
    arrays[name] = arrays[name] * np.float32(1.001)
    np.savez(kept, **arrays)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      self.assertEqual(plain_verbs.replay([f'--workdir={folder}']), 1)
    self.assertIn('syncer.jsonl:', out.getvalue())

  def test_a_folder_without_tapes_is_a_mistake(self):
    with self.assertRaises(errors.UserError):
      replaying.main(pathlib.Path(self.create_tempdir().full_path))


if __name__ == '__main__':
  absltest.main()
