"""Rows: their files, how steps fold into them, and the bounds."""

import json
import math
import pathlib
import struct
import threading

from absl.testing import absltest
from absl.testing import parameterized
from tensorboardX.proto import event_pb2

from diloco_jax.telemetry import metrics

WAIT_S = 30.0  # for an event that comes within a second; only failures wait


class Clock:
  """Time by hand."""

  def __init__(self):
    self.now_s = 100.0

  def __call__(self):
    return self.now_s


class StandIn:
  """In the place of a MetricsWriter: keeps rows, and may be held up."""

  def __init__(self, may_write=None):
    self.rows = []
    self.closed = False
    self.wrote = threading.Event()
    self.entered = threading.Event()
    self._may_write = may_write

  def row(self, **fields):
    self.entered.set()
    if self._may_write is not None:
      assert self._may_write.wait(WAIT_S)
    self.rows.append(fields)
    self.wrote.set()

  def close(self):
    self.closed = True


def read_events(folder):
  """(step, {tag: value}) of every event with values, from TensorBoard files."""
  found = []
  for path in sorted(folder.iterdir()):
    data = path.read_bytes()
    while data:
      (length,) = struct.unpack('<Q', data[:8])
      event = event_pb2.Event.FromString(data[12 : 12 + length])
      data = data[16 + length :]
      if event.summary.value:
        values = {v.tag: v.simple_value for v in event.summary.value}
        found.append((event.step, values))
  return found


class MetricsWriterTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.path = self.folder / 'metrics' / 'island_0.jsonl'

  def rows(self):
    return [json.loads(line) for line in self.path.read_text().splitlines()]

  def test_a_row_is_there_when_row_returns(self):
    writer = metrics.MetricsWriter(self.path)
    writer.row(t_s=1.0, step=1, loss=2.5)
    self.assertEqual(self.rows(), [{'t_s': 1.0, 'step': 1, 'loss': 2.5}])
    writer.row(t_s=2.0, step=2, loss=math.nan, state='training')
    self.assertEqual(
      self.rows()[1], {'t_s': 2.0, 'step': 2, 'loss': None, 'state': 'training'}
    )
    writer.close()

  def test_tensorboard_has_the_finite_numbers(self):
    writer = metrics.MetricsWriter(self.path, self.folder / 'tb')
    writer.row(t_s=1.0, step=7, loss=2.5, state='training', final=True)
    writer.row(t_s=2.0, step=8, loss=math.inf, tokens=3)
    writer.row(t_s=2.0, global_step=9, eval_loss=1.5)
    writer.row(t_s=3.0, step=9, loss=None)
    writer.close()
    self.assertEqual(
      read_events(self.folder / 'tb'),
      [(7, {'loss': 2.5}), (8, {'tokens': 3.0}), (9, {'eval_loss': 1.5})],
    )

  def test_rows_lost_to_the_disk_are_counted_and_not_raised(self):
    writer = metrics.MetricsWriter('/dev/full')
    with self.assertLogs(level='WARNING') as logs:
      writer.row(t_s=1.0)
      writer.row(t_s=2.0)
    self.assertEqual(writer.rows_lost, 2)
    self.assertLen(logs.output, 1)
    writer.close()


class FoldTest(parameterized.TestCase):
  """How steps become rows, with no thread and time by hand."""

  def setUp(self):
    super().setUp()
    self.clock = Clock()
    self.writer = StandIn()
    self.metrics = metrics.IslandMetrics(
      self.writer, 3, self.clock, background=False
    )
    self.done = 0

  def step(self, loss=1.0, exchange_s=0.001, step_time_s=0.01, **fields):
    self.done += 1
    self.clock.now_s += step_time_s
    self.metrics.step(
      self.done, 64 * self.done, loss, exchange_s, step_time_s, **fields
    )

  def test_ten_steps_a_row(self):
    for k in range(25):
      self.step(loss=float(k), exchange_s=0.002 if k == 4 else 0.001)
    self.assertLen(self.writer.rows, 2)
    self.metrics.close()
    self.assertTrue(self.writer.closed)
    self.assertEqual([r['steps'] for r in self.writer.rows], [10, 10, 5])
    self.assertEqual([r['step'] for r in self.writer.rows], [10, 20, 25])
    self.assertEqual([r['tokens'] for r in self.writer.rows], [640, 1280, 1600])
    self.assertEqual(
      [r['row_tokens'] for r in self.writer.rows], [640, 640, 320]
    )
    self.assertEqual([r['loss'] for r in self.writer.rows], [4.5, 14.5, 22.0])
    self.assertEqual(
      [r['exchange_s'] for r in self.writer.rows], [0.002, 0.001, 0.001]
    )
    row = self.writer.rows[0]
    self.assertAlmostEqual(row['t_s'], 100.1)
    self.assertAlmostEqual(row['step_time_s'], 0.01)
    self.assertAlmostEqual(row['tokens_per_s'], 6400.0, delta=0.1)
    self.assertEqual(row['incarnation'], 3)
    self.assertEqual(row['state'], 'training')

  def test_slow_steps_do_not_wait_for_ten(self):
    for _ in range(4):
      self.step(step_time_s=0.5)
    # Steps at 0.5, 1.0 | 1.5, 2.0 s: a row is at most 0.8 s old.
    self.assertEqual([r['steps'] for r in self.writer.rows], [2])
    self.metrics.flush()
    self.assertEqual([r['steps'] for r in self.writer.rows], [2, 2])

  def test_a_step_after_a_pause_has_its_own_row(self):
    for _ in range(3):
      self.step()
    self.step(step_time_s=30.0)
    self.step()
    self.metrics.close()
    self.assertEqual([r['steps'] for r in self.writer.rows], [3, 2])
    self.assertAlmostEqual(self.writer.rows[0]['t_s'], 100.03)

  def test_another_state_begins_a_row(self):
    self.step()
    self.step(state='waiting', anchors_age_s=2.0)
    self.metrics.state('saving')
    self.step()
    self.metrics.close()
    self.assertEqual(
      [(r['state'], r['steps']) for r in self.writer.rows],
      [('training', 1), ('waiting', 1), ('saving', 0), ('training', 1)],
    )
    saving = self.writer.rows[2]
    self.assertEqual((saving['step'], saving['tokens']), (2, 128))
    self.assertEqual(saving['row_tokens'], 0)
    self.assertIsNone(saving['loss'])
    self.assertIsNone(saving['step_time_s'])
    self.assertEqual(self.writer.rows[1]['anchors_age_s'], 2.0)

  def test_calls_that_finish_none_or_several_steps(self):
    self.metrics.step(0, 0, None, 0.5, 0.0)
    self.metrics.step(3, 192, 2.0, 0.1, 0.25)
    self.metrics.step(3, 192, 2.0, 0.7, 0.25)
    self.metrics.step(4, 256, 6.0, 0.1, 0.25)
    self.metrics.close()
    (row,) = self.writer.rows
    self.assertEqual((row['steps'], row['step']), (4, 4))
    self.assertEqual(row['loss'], 3.0)
    self.assertEqual(row['step_time_s'], 0.25)
    self.assertEqual(row['exchange_s'], 0.7)

  def test_no_row_covers_more_than_ten_steps(self):
    for step in (6, 12, 18):
      self.metrics.step(step, step, 1.0, 0.0, 0.01)
    self.metrics.close()
    self.assertEqual([r['steps'] for r in self.writer.rows], [6, 6, 6])

  def test_a_loss_that_is_not_finite_is_not_hidden(self):
    self.step(loss=1.0)
    self.step(loss=math.nan)
    self.metrics.close()
    self.assertTrue(math.isnan(self.writer.rows[0]['loss']))

  def test_a_restored_island_counts_on(self):
    restored = metrics.IslandMetrics(
      self.writer, 2, self.clock, step=50, tokens=3200, background=False
    )
    restored.step(51, 3264, 1.0, 0.0, 0.01)
    restored.close()
    (row,) = self.writer.rows
    self.assertEqual((row['steps'], row['row_tokens']), (1, 64))
    self.assertEqual((row['step'], row['tokens']), (51, 3264))


class BackgroundTest(absltest.TestCase):
  """The writing thread."""

  def test_a_row_is_written_though_no_step_follows(self):
    writer = StandIn()
    island = metrics.IslandMetrics(writer, 1, metrics.time.monotonic)
    island.step(1, 64, 1.0, 0.0, 0.01)
    self.assertTrue(writer.wrote.wait(WAIT_S))
    self.assertEqual(writer.rows[0]['steps'], 1)
    island.close()
    self.assertLen(writer.rows, 1)

  def test_close_writes_everything_and_ends_the_thread(self):
    writer = StandIn()
    before = threading.active_count()
    island = metrics.IslandMetrics(writer, 1, Clock())
    for k in range(1, 1006):
      island.step(k, 64 * k, 1.0, 0.0, 0.01)
    island.close()
    island.close()
    self.assertTrue(writer.closed)
    self.assertEqual(sum(row['steps'] for row in writer.rows), 1005)
    self.assertEqual(threading.active_count(), before)

  def test_a_stuck_disk_holds_up_no_step_and_loses_none(self):
    may_write = threading.Event()
    writer = StandIn(may_write)
    island = metrics.IslandMetrics(writer, 1, Clock())
    steps = 3 * metrics.STEPS_MAX * metrics.QUEUE_MAX
    for k in range(1, steps + 1):  # returns though nothing can be written
      island.step(k, k, 1.0, 0.5 if k == steps - 1 else 0.1, 0.01)
    self.assertTrue(writer.entered.wait(WAIT_S))
    may_write.set()
    island.close()
    self.assertEqual(sum(row['steps'] for row in writer.rows), steps)
    self.assertLessEqual(len(writer.rows), 2 * metrics.QUEUE_MAX + 3)
    self.assertEqual(writer.rows[-1]['exchange_s'], 0.5)


if __name__ == '__main__':
  absltest.main()
