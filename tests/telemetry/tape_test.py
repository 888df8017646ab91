"""The tape: its lines, a kill while writing, and what readers refuse."""

import os
import pathlib
import signal
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

from diloco_jax.telemetry import lines
from diloco_jax.telemetry import tape

# Appends until it is killed; says when the first durable line is there.
ENDLESS = """
import sys
from diloco_jax.telemetry import tape
writer = tape.TapeWriter(sys.argv[1])
writer.append('merge', {'k': -1}, 0.0, durable=True)
print('durable', flush=True)
k = 0
while True:
  writer.append('event', {'k': k, 'text': 'x' * 5000}, k)
  k += 1
"""


class TapeTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path) / 'tape.jsonl'

  def test_lines_have_a_time_and_a_kind_first(self):
    writer = tape.TapeWriter(self.path)
    writer.append('joined', {'island': 3}, 1.23456789)
    writer.append('merge', {'round': (1, 2)}, 2, durable=True)
    writer.close()
    self.assertEqual(
      self.path.read_text(),
      '{"t_s":1.234568,"kind":"joined","island":3}\n'
      '{"t_s":2.0,"kind":"merge","round":[1,2]}\n',
    )

  def test_a_second_writer_goes_on(self):
    for k in range(2):
      writer = tape.TapeWriter(self.path)
      writer.append('run_started', {'incarnation': k}, k)
      writer.close()
    self.assertEqual(
      [line['incarnation'] for line in tape.read_tape(self.path)], [0, 1]
    )

  def test_events_can_be_left_out(self):
    writer = tape.TapeWriter(self.path)
    writer.append('event', {'event': {'kind': 'x'}}, 1e9 + 0.123456)
    writer.append('left', {'why': '"kind":"event"'}, 1.0)
    # In another writer's style the mark is not found: it is left out anyway.
    with open(self.path, 'a') as file:
      file.write('{"kind": "event", "t_s": 1}\n')
    kinds = [line['kind'] for line in tape.read_tape(self.path)]
    self.assertEqual(kinds, ['event', 'left', 'event'])
    kinds = [line['kind'] for line in tape.read_tape(self.path, events=False)]
    self.assertEqual(kinds, ['left'])

  @parameterized.parameters(
    ('{"kind":"left"}', 't_s is not a number'),
    ('{"t_s":true,"kind":"left"}', 't_s is not a number'),
    ('{"t_s":1,"kind":7}', 'kind is not a string'),
  )
  def test_lines_without_time_or_kind_are_refused(self, line, detail):
    self.path.write_text(f'{{"t_s":0,"kind":"joined"}}\n{line}\n')
    with self.assertRaisesRegex(
      lines.MalformedLineError, rf'tape\.jsonl:2: {detail}'
    ):
      tape.read_tape(self.path)

  def test_a_missing_tape_is_missing(self):
    with self.assertRaises(FileNotFoundError):
      tape.read_tape(self.path)

  def test_a_kill_tears_at_most_the_last_line(self):
    with subprocess.Popen(
      [sys.executable, '-c', ENDLESS, self.path],
      stdout=subprocess.PIPE,
      env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
    ) as process:
      self.assertEqual(process.stdout.readline(), b'durable\n')
      process.send_signal(signal.SIGKILL)
      process.wait()
    read = tape.read_tape(self.path)
    self.assertEqual(read[0]['kind'], 'merge')
    self.assertEqual([x['k'] for x in read], list(range(-1, len(read) - 1)))
    writer = tape.TapeWriter(self.path)
    writer.append('run_started', {'incarnation': 2}, 9.0)
    writer.close()
    again = tape.read_tape(self.path)
    self.assertEqual(again[:-1], read)
    self.assertEqual(again[-1]['kind'], 'run_started')


if __name__ == '__main__':
  absltest.main()
