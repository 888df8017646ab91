"""`python -m diloco_jax train` with real processes and signals."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

from absl.testing import absltest
import pytest

ROOT = pathlib.Path(__file__).parents[2]
TIMEOUT_S = 300


def command(workdir, *flags):
  return [
    sys.executable, '-m', 'diloco_jax', 'train',
    '--config=experiments/configs/tiny.py', f'--workdir={workdir}',
    '--config.launch.runtime=processes', *flags,
  ]  # fmt: skip


def rows(path):
  if not path.exists():
    return []
  whole = path.read_text().rpartition('\n')[0]
  return [json.loads(line) for line in whole.splitlines()]


class Running:
  """A run in the background, ended with the test."""

  def __init__(self, test, *flags):
    self.workdir = pathlib.Path(test.create_tempdir().full_path) / 'run'
    # Shells start what runs in the background with SIGINT ignored, and a
    # child inherits that. A signal with a handler is its default in a child.
    # (A preexec_fn would do it too, but forks, which JAX warns of.)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
      self.process = subprocess.Popen(
        command(self.workdir, *flags),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
      )
    finally:
      signal.signal(signal.SIGINT, before)
    test.addCleanup(self.end)

  def end(self):
    """End it if the test did not; SIGTERM ends the islands too."""
    if self.process.poll() is None:
      self.process.terminate()
      self.process.wait(TIMEOUT_S)
    self.process.stdout.close()

  def wait_for_step(self, island, step):
    """Until an island has made so many steps, by its metrics."""
    path = self.workdir / 'metrics' / f'island_{island}.jsonl'
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
      if any(row['step'] >= step for row in rows(path)):
        return
      if self.process.poll() is not None:
        raise AssertionError(self.process.stdout.read())
      time.sleep(0.05)
    raise AssertionError('no progress')

  def pid(self, role, index):
    table = json.loads((self.workdir / 'processes.json').read_text())
    return next(
      x['pid'] for x in table if (x['role'], x['index']) == (role, index)
    )

  def finish(self):
    output, _ = self.process.communicate(timeout=TIMEOUT_S)
    return self.process.returncode, output

  def summary(self):
    return json.loads((self.workdir / 'summary.json').read_text())


# A floor makes the toy's steps long enough for rounds to fit between them.
FLAGS = (
  '--config.steps=120', '--config.islands=3', '--config.sync.period=4',
  '--config.launch.step_floor_ms=20', '--config.metrics.eval_every_s=0.0',
)  # fmt: skip


class TrainTest(absltest.TestCase):
  def test_an_island_killed_half_way_is_told_of_and_not_missed(self):
    run = Running(self, *FLAGS)
    run.wait_for_step(1, 40)
    killed = run.pid('island', 1)
    os.kill(killed, signal.SIGKILL)
    code, output = run.finish()
    self.assertEqual(code, 0, output)
    summary = run.summary()
    self.assertEqual(summary['status'], 'ok')
    self.assertIn('SIGKILL', output)
    self.assertEqual(
      [(x['kind'], x['target']) for x in summary['faults']],
      [('death', 'island_1')],
    )
    merges = [
      x for x in rows(run.workdir / 'tape' / 'syncer.jsonl')
      if x['kind'] == 'merge'
    ]  # fmt: skip
    self.assertGreaterEqual(merges[-1]['global_step'], 118)
    table = json.loads((run.workdir / 'processes.json').read_text())
    islands = [x for x in table if x['role'] == 'island']
    self.assertLen({x['pid'] for x in islands}, 3)
    self.assertEqual({x['incarnation'] for x in islands}, {1})
    self.assertEqual({x['exit'] for x in islands}, {'0', 'SIGKILL'})
    self.assertTrue((run.workdir / 'report.html').exists())
    self.assertTrue((run.workdir / 'model').is_dir())
    mode = (run.workdir / 'token').stat().st_mode & 0o777
    self.assertEqual(mode, 0o600)

  @pytest.mark.slow
  def test_ctrl_c_leaves_a_valid_run_folder(self):
    run = Running(self, *FLAGS, '--config.steps=100000')
    run.wait_for_step(0, 40)
    run.process.send_signal(signal.SIGINT)
    code, output = run.finish()
    self.assertEqual(code, 130, output)
    self.assertEqual(run.summary()['status'], 'interrupted')
    self.assertTrue((run.workdir / 'model').is_dir())
    table = json.loads((run.workdir / 'processes.json').read_text())
    self.assertNotIn(None, [x['ended_s'] for x in table])
    self.assertEqual({x['exit'] for x in table}, {'0'})

  @pytest.mark.slow
  def test_islands_end_when_the_launcher_is_killed(self):
    run = Running(self, *FLAGS, '--config.steps=100000')
    run.wait_for_step(0, 40)
    pids = [run.pid('island', k) for k in range(3)] + [run.pid('syncer', 0)]
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    run.process.stdout.close()
    deadline = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < deadline:
      time.sleep(0.1)
    self.assertEmpty([pid for pid in pids if alive(pid)])


def alive(pid):
  try:
    state = pathlib.Path(f'/proc/{pid}/stat').read_text().split()[2]
  except FileNotFoundError:
    return False
  return state != 'Z'  # a zombie waits for its parent, which is gone


if __name__ == '__main__':
  absltest.main()
