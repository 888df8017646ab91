"""Whole lines only, whatever kills the writer."""

import json
import math
import os
import pathlib
import resource

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from diloco_jax.telemetry import lines


class LinesTestCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.path = self.folder / 'sub' / 'a.jsonl'

  def read(self):
    return [fields for _, fields in lines.read_lines(self.path)]

  def write(self, data):
    self.path.parent.mkdir(exist_ok=True)
    self.path.write_bytes(data)


class EncodeTest(LinesTestCase):
  def test_one_line_of_json(self):
    raw = lines.encode_line({'a': 'x\ny', 'b': (1, np.float32(0.5)), 'c': None})
    self.assertEqual(raw.count(b'\n'), 1)
    self.assertEqual(json.loads(raw), {'a': 'x\ny', 'b': [1, 0.5], 'c': None})

  @parameterized.parameters(
    math.nan, math.inf, -math.inf, np.float32(math.nan), np.float64(math.inf)
  )
  def test_what_json_does_not_have_becomes_null(self, value):
    raw = lines.encode_line({'a': value, 'b': [{'c': value}], 'd': 1.5})
    self.assertEqual(json.loads(raw), {'a': None, 'b': [{'c': None}], 'd': 1.5})

  def test_other_values_are_refused(self):
    for value in (object(), {1, 2}, np.zeros(3)):
      with self.subTest(str(value)), self.assertRaises(TypeError):
        lines.encode_line({'a': value})


class LineFileTest(LinesTestCase):
  def test_a_line_is_there_when_append_returns(self):
    file = lines.LineFile(self.path)
    for k in range(3):
      file.append(b'{"k":%d}\n' % k, durable=k == 1)
      self.assertEqual(self.read(), [{'k': j} for j in range(k + 1)])
    file.close()
    with self.assertRaisesRegex(ValueError, 'closed'):
      file.append(b'{}\n')

  @parameterized.parameters(
    (b'{"k":0}\n{"k":1', b'{"k":0}\n'),
    (b'{"k":1', b''),
    (b'{"k":0}\n{"k":1}', b'{"k":0}\n'),  # whole, but not acknowledged
    (b'{"k":0}\n', b'{"k":0}\n'),
    (b'{"k":0}\n' + b'x' * 200_000, b'{"k":0}\n'),
    (b'', b''),
  )
  def test_the_next_writer_removes_a_torn_line(self, left, kept):
    self.write(left)
    file = lines.LineFile(self.path)
    self.assertEqual(self.path.read_bytes(), kept)
    file.append(b'{"k":2}\n')
    file.close()
    self.assertEqual(self.path.read_bytes(), kept + b'{"k":2}\n')

  def test_a_full_disk_leaves_whole_lines(self):
    file = lines.LineFile(self.path)
    file.append(b'{"k":0}\n')
    long = b'{"k":"%s"}\n' % (b'x' * 100_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The system takes the first bytes of the line and then refuses.
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
      with self.assertRaises(OSError):
        file.append(long)
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    self.assertEqual(self.path.read_bytes(), b'{"k":0}\n')
    file.append(b'{"k":1}\n')
    file.close()
    self.assertEqual(self.read(), [{'k': 0}, {'k': 1}])


class ReadTest(LinesTestCase):
  def test_exactly_a_torn_last_line_is_left_out(self):
    self.write(b'{"k":0}\n{"k":1}\n{"k"')
    self.assertEqual(self.read(), [{'k': 0}, {'k': 1}])

  @parameterized.parameters(
    (b'{"k":0}\n{"k"\n{"k":2}\n', 2, 'not JSON'),
    (b'{"k":0}\n{"k"\n', 2, 'not JSON'),  # it has its line break: not torn
    (b'[1]\n', 1, 'not a JSON object'),
    (b'\n', 1, 'not JSON'),
    (b'{"k":0}\n{"k":NaN}\n', 2, 'NaN is not JSON'),
    (b'\x00\x00\n', 1, 'not JSON'),
    (b'\xff\xfe{}\n', 1, 'not JSON'),
    (b'[' * 100_000 + b'\n', 1, 'not JSON'),
  )
  def test_anything_else_is_told_with_file_and_line(self, data, line, detail):
    self.write(data)
    with self.assertRaisesRegex(lines.MalformedLineError, detail) as caught:
      self.read()
    self.assertEqual(caught.exception.line, line)
    self.assertIn(f'a.jsonl:{line}: ', str(caught.exception))

  def test_lines_not_kept_are_not_read(self):
    self.write(b'{"k":0}\nnonsense\n{"k":2}\n')
    found = lines.read_lines(self.path, lambda raw: raw.startswith(b'{'))
    self.assertEqual(list(found), [(1, {'k': 0}), (3, {'k': 2})])


class LineTailTest(LinesTestCase):
  def test_each_line_once_and_torn_ones_when_whole(self):
    tail = lines.LineTail(self.path)
    self.assertEqual(tail.poll(), [])  # no file yet
    self.write(b'1\n2\n3')
    self.assertEqual(tail.poll(), [b'1\n', b'2\n'])
    self.assertEqual(tail.poll(), [])
    with open(self.path, 'ab') as file:
      file.write(b'3\n4\n')
    self.assertEqual(tail.poll(), [b'33\n', b'4\n'])

  def test_a_torn_line_that_the_next_writer_removes_was_not_counted(self):
    tail = lines.LineTail(self.path)
    self.write(b'1\nto')
    self.assertEqual(tail.poll(), [b'1\n'])
    file = lines.LineFile(self.path)
    file.append(b'2\n')
    file.close()
    self.assertEqual(tail.poll(), [b'2\n'])


class WriteAtomicTest(LinesTestCase):
  def test_replaces_and_leaves_nothing_beside(self):
    for text in ('one', 'two µ'):
      lines.write_atomic(self.path, text)
      self.assertEqual(self.path.read_text(encoding='utf-8'), text)
    self.assertEqual(os.listdir(self.path.parent), ['a.jsonl'])

  def test_a_failure_keeps_the_old(self):
    lines.write_atomic(self.path, 'old')
    with self.assertRaises(UnicodeEncodeError):
      lines.write_atomic(self.path, 'new \ud800')
    self.assertEqual(self.path.read_text(), 'old')
    self.assertEqual(os.listdir(self.path.parent), ['a.jsonl'])


if __name__ == '__main__':
  absltest.main()
