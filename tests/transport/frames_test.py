"""Frames, and what a hostile peer may make of them."""

import json
import struct

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st
import jax
import numpy as np
import xxhash

from diloco_jax.protocol import messages as m
from diloco_jax.protocol import records
from diloco_jax.transport import base
from diloco_jax.transport import frames
from tests.transport import ends

FUZZ = hypothesis.settings(
  max_examples=100, deadline=None, derandomize=True, database=None
)


def parser(message_bytes_max=1 << 20, allowed=m.TO_SYNCER):
  return frames.Parser('c1', allowed, message_bytes_max, frames.Pool())


def frame(
  kind, body, number=0, magic=b'DiLo', version=1, length=None, checksum=None
):
  """A frame by the description of the format, apart from the code."""
  if length is None:
    length = len(body)
  if checksum is None:
    checksum = xxhash.xxh3_64(body).intdigest()
  header = magic + struct.pack('<BBHI', version, kind, 0, number)
  return header + struct.pack('<IQ', length, checksum) + body


def head(lengths, message=None, kind='f32'):
  message = records.to_plain(message or ends.contribution())
  return json.dumps(
    {'message': message, 'kind': kind, 'lengths': lengths}
  ).encode()


def plain(**changes):
  fields = records.to_plain(ends.report())
  fields.update(changes)
  return json.dumps(fields).encode()


class FramesTest(parameterized.TestCase):
  def test_control_is_what_the_format_says(self):
    made = frames.control_frame(ends.report(5))
    body = made[frames.HEADER.size :]
    self.assertEqual(json.loads(body), records.to_plain(ends.report(5)))
    self.assertEqual(made, frame(1, body))

  def test_bulk_is_what_the_format_says(self):
    payload = ends.payload(5, 0, 7)
    first, *chunks = frames.bulk_frames(9, ends.contribution(), payload, 8)
    data = b''.join(x.tobytes() for x in payload.buffers)
    self.assertEqual(
      json.loads(first[frames.HEADER.size :]),
      json.loads(head([5, 0, 7])),
    )
    self.assertEqual(chunks, [frame(3, data[:8], 9), frame(3, data[8:], 9)])

  def test_chunks_may_come_between_chunks(self):
    p = parser()
    self.assertIsNone(p.feed(frame(2, head([4]), 1)))
    self.assertIsNone(p.feed(frame(3, b'ab', 1)))
    second = head([3], ends.contribution(1))
    self.assertIsNone(p.feed(frame(2, second, 2)))
    done = p.feed(frame(3, b'xyz', 2))
    self.assertEqual(done.message, ends.contribution(1))
    self.assertEqual(ends.as_bytes(done.payload), ('f32', [b'xyz']))
    done = p.feed(frame(3, b'cd', 1))
    self.assertEqual(ends.as_bytes(done.payload), ('f32', [b'abcd']))
    # A number may be used again.
    self.assertIsNone(p.feed(frame(2, head([4]), 1)))

  @parameterized.named_parameters(
    ('short', b'DiLo', 'no frame'),
    ('garbage', bytes(range(100)), 'not a frame of this protocol'),
    ('magic', frame(1, plain(), magic=b'diLo'), 'not a frame'),
    ('version', frame(1, plain(), version=2), 'wire version 2, expected 1'),
    ('checksum', frame(1, plain(), checksum=7), 'wrong checksum'),
    ('length', frame(1, plain(), length=3), 'announced 3'),
    ('kind', frame(5, plain()), 'unknown kind 5'),
    ('more_than_an_end', frame(4, b'x'), 'an end amid'),
    ('no_json', frame(1, b'{'), 'not JSON'),
    ('not_utf8', frame(1, b'"\xff"'), 'not JSON'),
    ('half_a_pair', frame(1, plain(state='\ud800')), 'not JSON'),
    ('deep', frame(1, b'[' * 100_000), 'not JSON'),
    ('much_json', frame(1, b' ' * (1 << 20) + b'1'), 'bytes of JSON'),
    ('nan', frame(1, plain(loss=float('nan'))), 'NaN is not a number'),
    ('infinity', frame(1, plain(loss=float('inf'))), 'Infinity'),
    ('overflow', frame(1, plain(loss=12345).replace(b'12345', b'1e999')),
     'finite'),
    ('no_float', frame(1, plain(step_time_s=10**400)), 'step_time_s|too large'),
    ('big_integer', frame(1, plain(step=10**400)), 'out of range'),
    ('digits', frame(1, b'1' * 5000), 'not JSON'),
    ('no_message', frame(1, b'[]'), 'expected a message'),
    ('unknown', frame(1, b'{"_": "Report2"}'), 'unknown message'),
    ('fields', frame(1, plain(more=1)), 'fields differ'),
    ('type', frame(1, plain(step='1')), 'Report.step'),
    ('other_way', frame(1, b'{"_":"Closed","island":0,"incarnation":1,'
                           b'"slot":0}'), 'goes the other way'),
    ('no_payload', frame(1, json.dumps(records.to_plain(
        ends.contribution())).encode()), 'without its payload'),
    ('no_head', frame(2, b'{}'), 'not a head'),
    ('no_bulk', frame(2, head([1], ends.report())), 'with a payload'),
    ('codec', frame(2, head([1], kind='x' * 33)), 'name of a codec'),
    ('codec_type', frame(2, head([1], kind=3)), 'name of a codec'),
    ('lengths', frame(2, head(5)), 'list of lengths'),
    ('negative', frame(2, head([5, -1])), 'not numbers'),
    ('boolean', frame(2, head([True])), 'not numbers'),
    ('buffers', frame(2, head([0] * (1 << 17))), 'list of lengths'),
    ('large', frame(2, head([1 << 20, 1])), '1048577 bytes, at most 1048576'),
    ('huge', frame(2, head([10**18] * 9)), 'at most 1048576'),
    ('chunk_of_nothing', frame(3, b'abc', 5), 'a chunk of nothing'),
  )  # fmt: skip
  def test_refuses(self, data, reason):
    with self.assertRaisesRegex(frames.FrameError, reason):
      parser().feed(data)

  def test_refuses_chunks_that_do_not_fit(self):
    for body in (b'', b'abcde'):
      p = parser()
      p.feed(frame(2, head([4]), 1))
      with self.assertRaisesRegex(frames.FrameError, 'does not fit'):
        p.feed(frame(3, body, 1))

  def test_nothing_comes_after_the_end(self):
    p = parser()
    self.assertIsNone(p.feed(frames.end_frame()))
    self.assertTrue(p.is_ended)
    for data in (frames.end_frame(), frame(1, plain())):
      with self.assertRaisesRegex(frames.FrameError, 'after the end'):
        p.feed(data)
    p = parser()
    p.feed(frame(2, head([4]), 1))
    with self.assertRaisesRegex(frames.FrameError, 'amid a message'):
      p.feed(frames.end_frame())
    self.assertFalse(p.is_ended)

  def test_refuses_many_at_once(self):
    p = parser()
    for number in range(frames.PARTIAL_MAX):
      p.feed(frame(2, head([4]), number))
    with self.assertRaisesRegex(frames.FrameError, 'too many'):
      p.feed(frame(2, head([4]), 99))
    p = parser()
    p.feed(frame(2, head([4]), 1))
    with self.assertRaisesRegex(frames.FrameError, 'too many'):
      p.feed(frame(2, head([4]), 1))

  def test_what_cannot_be_written_is_refused_at_once(self):
    with self.assertRaises(ValueError):
      frames.control_frame(ends.report(loss=float('nan')))
    text = m.Refusal('', 'x' * (1 << 20))
    with self.assertRaisesRegex(ValueError, 'bytes of JSON'):
      frames.control_frame(text)
    many = base.Payload('f32', (np.empty(10**9, np.uint8),) * (1 << 17))
    with self.assertRaisesRegex(ValueError, 'bytes of JSON'):
      frames.bulk_frames(1, ends.contribution(), many, 100)

  def feed(self, p, data):
    """Anything but a FrameError fails the test."""
    try:
      return p.feed(data)
    except frames.FrameError:
      return None

  @FUZZ
  @hypothesis.given(st.lists(st.binary(max_size=200), max_size=4))
  def test_fuzz_bytes(self, items):
    p = parser()
    for data in items:
      self.feed(p, data)

  @FUZZ
  @hypothesis.given(
    st.integers(0, 5),
    st.integers(0, 400),
    st.binary(min_size=1, max_size=8),
    st.booleans(),
  )
  def test_fuzz_changed_frames(self, which, at, new, mend):
    good = [
      frames.control_frame(ends.report(1)),
      *frames.bulk_frames(
        3, ends.contribution(), ends.payload(7, 0, 8), chunk_bytes=4
      ),
    ]
    which %= len(good)
    at %= len(good[which])
    changed = good[which][:at] + new + good[which][at + len(new) :]
    if mend:  # the checksum fits: what it holds is to be refused
      changed = frame(changed[5] % 5, changed[frames.HEADER.size :], 3)
    p = parser()
    for k, data in enumerate(good):
      self.feed(p, changed if k == which else data)

  _json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=10)
    | st.sampled_from(sorted(m.MESSAGES)),
    lambda inner: (
      st.lists(inner, max_size=4)
      | st.dictionaries(
        st.sampled_from(['_', 'message', 'kind', 'lengths', 'island', 'x']),
        inner,
        max_size=4,
      )
    ),
    max_leaves=10,
  )

  @FUZZ
  @hypothesis.given(st.integers(1, 2), _json_values)
  def test_fuzz_json(self, kind, value):
    self.feed(parser(), frame(kind, json.dumps(value).encode()))

  @FUZZ
  @hypothesis.given(
    st.sampled_from(sorted(records.to_plain(ends.report()))), _json_values
  )
  def test_fuzz_fields(self, field, value):
    made = self.feed(parser(), frame(1, plain(**{field: value})))
    if made is not None:  # then it can be written again
      frames.control_frame(made.message)

  @FUZZ
  @hypothesis.given(
    st.lists(st.integers(0, 50), max_size=6), st.integers(1, 60)
  )
  def test_any_sizes_come_back(self, sizes, chunk_bytes):
    payload = ends.payload(*sizes)
    p = parser()
    made = [
      p.feed(x)
      for x in frames.bulk_frames(1, ends.contribution(), payload, chunk_bytes)
    ]
    self.assertTrue(all(x is None for x in made[:-1]))
    self.assertEqual(ends.as_bytes(made[-1].payload), ends.as_bytes(payload))


class PoolTest(parameterized.TestCase):
  SIZE = 1 << 20

  def address(self, array):
    return array.__array_interface__['data'][0]

  def test_free_memory_is_used_again(self):
    pool = frames.Pool()
    x = pool.take(self.SIZE)
    first = self.address(x)
    del x
    self.assertEqual(self.address(pool.take(self.SIZE)), first)
    self.assertEqual(self.address(pool.take(self.SIZE * 3 // 4)), first)

  @parameterized.named_parameters(
    ('itself', lambda x: x),
    ('slice', lambda x: x[7:9]),
    ('slice_of_slice', lambda x: x[7:900][3:5][:1]),
    ('view', lambda x: x.view(np.float32)),
    ('reshaped', lambda x: x[:100].reshape(10, 10).T),
    ('frombuffer', lambda x: np.frombuffer(x[8:16], np.float32)),
    ('memoryview', lambda x: memoryview(x)[5:6]),
    ('array_of_memoryview', lambda x: np.asarray(memoryview(x[4:8]))),
    ('jax', lambda x: jax.numpy.asarray(x.view(np.float32))),
    ('jax_dlpack', lambda x: jax.dlpack.from_dlpack(x.view(np.float32))),
    ('jax_put', lambda x: jax.block_until_ready(
        jax.device_put(x[:4096].view(np.float32)))),
  )  # fmt: skip
  def test_memory_in_use_is_left_alone(self, view_of):
    pool = frames.Pool()
    x = pool.take(self.SIZE)
    x[:] = 7
    view = view_of(x)
    expected = np.array(view)
    del x
    others = [pool.take(self.SIZE) for _ in range(20)]
    for other in others:
      other[:] = 99
    np.testing.assert_array_equal(np.array(view), expected)

  def test_a_jax_view_shares_the_memory_and_frees_it(self):
    pool = frames.Pool()
    x = pool.take(self.SIZE)
    first = self.address(x)
    view = jax.dlpack.from_dlpack(x)
    self.assertEqual(view.unsafe_buffer_pointer(), first)
    del x
    other = pool.take(self.SIZE)
    self.assertNotEqual(self.address(other), first)
    del view
    self.assertEqual(self.address(pool.take(self.SIZE)), first)

  def test_keeps_a_few_and_wastes_little(self):
    pool = frames.Pool(keep=2)
    taken = [pool.take(self.SIZE) for _ in range(5)]
    addresses = [self.address(x) for x in taken]
    del taken
    again = [pool.take(self.SIZE) for _ in range(2)]
    self.assertCountEqual([self.address(x) for x in again], addresses[3:])
    del again
    small = pool.take(1000)  # not in a block of a million
    self.assertNotIn(self.address(small), addresses[3:])

  def test_nothing(self):
    self.assertEqual(frames.Pool().take(0).shape, (0,))


if __name__ == '__main__':
  absltest.main()
