"""A run folder read while it grows."""

import pathlib
from unittest import mock

from absl.testing import absltest

from diloco_jax.telemetry import lines
from diloco_jax.telemetry import view as view_lib
from tests.telemetry import synthetic_run as synthetic


class RunViewTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path) / 'run'

  def test_before_there_is_anything(self):
    view = view_lib.RunView(self.workdir)
    self.assertFalse(view.poll())
    self.assertEqual(view.islands, {})
    self.assertIsNone(view.global_step)
    self.assertIsNone(view.goodput(2))
    self.assertIsNone(view.left_s(8))
    self.assertIsNone(view.bytes_up)
    self.assertEqual(view.take_decisions(), [])

  def test_the_newest_of_a_whole_run(self):
    synthetic.write_run(self.workdir)
    view = view_lib.RunView(self.workdir)
    self.assertTrue(view.poll())
    self.assertEqual(sorted(view.islands), [0, 1])
    self.assertEqual(view.islands[0]['step'], 12)
    self.assertEqual(view.islands[1]['incarnation'], 2)
    self.assertEqual(view.incarnations, {0: 1, 1: 2})
    self.assertEqual(view.standing, {0: 'left', 1: 'left'})
    self.assertEqual((view.bytes_up, view.bytes_down), (350, 25))
    self.assertEqual((view.merges, view.refused), (6, 3))
    self.assertEqual(view.steps_done, 19)
    self.assertEqual(view.global_step, 8)
    self.assertEqual(view.evaluation['eval_loss'], 2.5)
    self.assertEqual(view.finished['reason'], 'steps')
    self.assertAlmostEqual(view.goodput(2), 19 / 24)
    self.assertAlmostEqual(view.goodput(2, floor_s=0.5), 19 / 48)
    # 6 global steps in 8 s.
    self.assertAlmostEqual(view.left_s(20), 16.0)
    self.assertEqual(view.left_s(8), 0.0)
    self.assertEqual(view.now_s, 13.5)
    self.assertFalse(view.poll())

  def test_only_new_bytes_are_read(self):
    synthetic.write_run(self.workdir)
    view = view_lib.RunView(self.workdir)
    view.poll()
    view.take_decisions()
    path = self.workdir / 'metrics' / 'island_0.jsonl'
    size = path.stat().st_size
    with open(path, 'r+b') as file:  # what was read is not looked at again
      file.write(b'#' * (size - 1))
    with open(path, 'ab') as file:
      file.write(lines.encode_line(synthetic.row(13.0, 1, 13, 1, 3.25)))
      file.write(b'{"t_s": 14.0, "st')
    self.assertTrue(view.poll())
    self.assertEqual(view.islands[0]['loss'], 3.25)
    self.assertEqual(view.steps_done, 20)
    self.assertEqual(view.bad_lines, 0)
    self.assertFalse(view.poll())
    with open(path, 'ab') as file:
      file.write(b'ep": 14, "steps": 1}\n')
    self.assertTrue(view.poll())
    self.assertEqual(view.islands[0]['step'], 14)

  def test_islands_may_come_later(self):
    synthetic.write_run(self.workdir, without=['metrics/island_1.jsonl'])
    view = view_lib.RunView(self.workdir)
    view.poll()
    self.assertEqual(sorted(view.islands), [0])
    synthetic.write_lines(
      self.workdir / 'metrics' / 'island_1.jsonl', synthetic.ISLANDS[1]
    )
    view.poll()
    self.assertEqual(sorted(view.islands), [0, 1])

  def test_lines_that_cannot_be_read_are_counted(self):
    synthetic.write_run(self.workdir)
    for name in ('tape/syncer', 'metrics/syncer', 'metrics/island_0'):
      with open(self.workdir / f'{name}.jsonl', 'ab') as file:
        file.write(b'nonsense\n{"no": "time"}\n')
    view = view_lib.RunView(self.workdir)
    view.poll()
    self.assertEqual(view.bad_lines, 6)
    self.assertEqual(view.steps_done, 19)

  def test_a_long_file_is_read_in_pieces(self):
    synthetic.write_run(self.workdir)
    with mock.patch.object(lines, 'POLL_BYTES_MAX', 700):
      view = view_lib.RunView(self.workdir)
      polls = 0
      while view.poll():
        polls += 1
    self.assertGreater(polls, 3)
    self.assertEqual(view.merges, 6)
    self.assertEqual(view.bad_lines, 0)

  def test_decisions_worth_telling_once(self):
    tape = synthetic.tape()
    tape.insert(1, synthetic.line(0.1, 'event', event={}, actions=[]))
    tape.insert(2, synthetic.line(0.2, 'joined', island=-1, incarnation=1,
                                  entry='fresh'))  # fmt: skip
    synthetic.write_run(self.workdir, tape_lines=tape)
    view = view_lib.RunView(self.workdir)
    view.poll()
    self.assertNotIn(-1, view.standing)
    kinds = [line['kind'] for line in view.take_decisions()]
    self.assertEqual(
      kinds,
      ['run_started', 'joined', 'joined', 'joined', 'refused', 'lapsed',
       'joined', 'refused', 'refused', 'draining', 'left', 'left', 'finished',
       'eval', 'eval'],
    )  # fmt: skip
    self.assertEqual(view.take_decisions(), [])

  def test_a_row_about_a_state_keeps_the_loss(self):
    state = {**synthetic.row(13.0, 1, 12, 0, None), 'state': 'saving'}
    synthetic.write_run(
      self.workdir, islands={0: [*synthetic.ISLANDS[0], state]}
    )
    view = view_lib.RunView(self.workdir)
    view.poll()
    self.assertEqual(view.islands[0]['state'], 'saving')
    self.assertEqual(view.islands[0]['loss'], 3.5)


if __name__ == '__main__':
  absltest.main()
