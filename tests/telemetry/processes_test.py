"""processes.json."""

import json
import pathlib
import signal

from absl.testing import absltest
from absl.testing import parameterized

from diloco_jax.telemetry import lines
from diloco_jax.telemetry import processes


class ProcessTableTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path) / 'processes.json'
    self.now_s = 0.0
    self.table = processes.ProcessTable(self.path, lambda: self.now_s)

  def read(self):
    return json.loads(self.path.read_text())

  def test_a_process_from_start_to_end(self):
    self.now_s = 1.5
    self.table.start('island', 2, None, 4711)
    row = {
      'role': 'island', 'index': 2, 'incarnation': None, 'pid': 4711,
      'started_s': 1.5, 'ended_s': None, 'exit': None,
    }  # fmt: skip
    self.assertEqual(self.read(), [row])
    self.table.set_incarnation(4711, 3)
    self.assertEqual(self.read(), [{**row, 'incarnation': 3}])
    self.now_s = 9.25
    self.table.end(4711, 'SIGKILL')
    ended = {**row, 'incarnation': 3, 'ended_s': 9.25, 'exit': 'SIGKILL'}
    self.assertEqual(self.read(), [ended])
    self.assertEqual(self.table.rows, [ended])

  def test_a_number_used_again_is_the_newest_process(self):
    self.table.start('island', 0, 1, 4711)
    self.table.end(4711, '1')
    self.table.start('island', 1, 1, 4711)
    self.table.end(4711, '0')
    self.assertEqual([row['exit'] for row in self.read()], ['1', '0'])
    with self.assertRaisesRegex(KeyError, '4711'):
      self.table.end(4711, '0')
    with self.assertRaisesRegex(KeyError, '99'):
      self.table.set_incarnation(99, 1)

  def test_a_later_launcher_goes_on(self):
    self.table.start('syncer', 0, 1, 10)
    again = processes.ProcessTable(self.path, lambda: 7.0)
    again.start('syncer', 0, 2, 11)
    self.assertEqual([row['pid'] for row in self.read()], [10, 11])

  @parameterized.parameters('{', '{}', '[1]')
  def test_what_is_no_table_is_refused(self, text):
    self.path.write_text(text)
    with self.assertRaises(lines.MalformedLineError):
      processes.read_processes(self.path)

  @parameterized.parameters(
    (0, '0', False),
    (1, '1', True),
    (-int(signal.SIGKILL), 'SIGKILL', True),
    (-99, 'signal 99', True),
  )
  def test_exits(self, code, text, bad):
    self.assertEqual(processes.exit_text(code), text)
    self.assertEqual(processes.is_bad_exit(text), bad)

  def test_exits_that_are_no_fault(self):
    self.assertFalse(processes.is_bad_exit(None))
    self.assertFalse(processes.is_bad_exit(processes.EXIT_STOPPED))


if __name__ == '__main__':
  absltest.main()
