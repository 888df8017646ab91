"""The same lock-step run in threads and in processes, by the real program."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

from absl.testing import absltest
import jax
import numpy as np
import pytest

from diloco_jax.storage import parameters

ROOT = pathlib.Path(__file__).resolve().parents[2]
TIMEOUT_S = 300

FLAGS = (
  '--config=experiments/configs/tiny.py',
  '--config.preset=diloco',
  '--config.islands=2',
  '--config.steps=5',
  '--config.sync.fragments=1',
  '--config.sync.period=2',
  '--config.sync.overlap=0',
  '--config.metrics.eval_every_s=0',
)

# Relative to the largest value of each tensor. Both compute in f32, but XLA
# may divide the work of an operation otherwise where islands have other
# numbers of cores: a few roundings of 6e-8 in each of five steps.
TOLERANCE = 1e-5


def train(*words):
  """Runs the program in a process group of its own, which ends with it."""
  process = subprocess.Popen(
    [sys.executable, '-m', 'diloco_jax', 'train', *FLAGS, *words],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    start_new_session=True,
  )
  try:
    output, _ = process.communicate(timeout=TIMEOUT_S)
  except BaseException:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    raise
  assert process.returncode == 0, output


@pytest.mark.slow
class RuntimesTest(absltest.TestCase):
  def test_threads_and_processes_agree(self):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    text = folder / 'text.txt'
    words = np.random.default_rng(0).choice(['to ', 'be ', 'or ', 'not '], 4000)
    text.write_text(''.join(words), encoding='utf-8')
    models, summaries = [], []
    for runtime in ('threads', 'processes'):
      workdir = folder / runtime
      train(
        f'--config.launch.runtime={runtime}',
        f'--config.data.path={text}',
        f'--workdir={workdir}',
      )
      models.append(parameters.load(workdir / 'model'))
      summaries.append(json.loads((workdir / 'summary.json').read_text()))

    for key in ('inner_steps_total', 'merges', 'tokens_merged'):
      self.assertEqual(summaries[0][key], summaries[1][key], key)
    self.assertEqual(summaries[0]['inner_steps_total'], 10)
    self.assertEqual(summaries[0]['merges'], 3)
    one, other = map(jax.tree.leaves_with_path, models)
    self.assertEqual([x for x, _ in one], [x for x, _ in other])
    for (path, x), (_, y) in zip(one, other, strict=True):
      np.testing.assert_allclose(
        x, y, rtol=0, atol=TOLERANCE * np.abs(y).max(), err_msg=str(path)
      )


if __name__ == '__main__':
  absltest.main()
