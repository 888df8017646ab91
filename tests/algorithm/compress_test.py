"""Codecs and their bytes."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from diloco_jax import algorithm as A

SHAPES = {'b': (), 'a': (3, 5), 'empty': (0, 4), 'odd': (7,), 'one': (1, 1)}
VALUES = 1 + 15 + 0 + 7 + 1


def random_tree(seed=0):
  rng = np.random.default_rng(seed)
  return {
    name: np.asarray(rng.standard_normal(shape), np.float32)
    for name, shape in SHAPES.items()
  }


def bf16(x):
  return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32)


class RoundTripTest(parameterized.TestCase):
  @parameterized.product(
    codec=['f32', 'bf16'], jitted=[False, True], device=[False, True]
  )
  def test_round_trip(self, codec, jitted, device):
    tree = random_tree()
    given = jax.tree.map(jnp.asarray, tree) if device else tree
    encode = functools.partial(A.encode, codec=codec)
    if jitted:
      encoded = jax.jit(encode)(given)
      decoded = jax.jit(A.decode)(encoded)
    else:
      encoded = encode(given)
      decoded = A.decode(encoded)
    self.assertEqual(set(decoded), set(tree))
    for name, value in tree.items():
      expected = value if codec == 'f32' else bf16(value)
      np.testing.assert_array_equal(decoded[name], expected)
      self.assertEqual(decoded[name].dtype, np.float32)
      self.assertEqual(decoded[name].shape, SHAPES[name])

  @parameterized.parameters(('f32', 4), ('bf16', 2))
  def test_nbytes_is_exact(self, codec, width):
    encoded = A.encode(random_tree(), codec)
    self.assertEqual(encoded.nbytes, width * VALUES)
    buffers = A.to_buffers(encoded)
    self.assertEqual(sum(x.nbytes for x in buffers), encoded.nbytes)
    abstract = jax.eval_shape(lambda x: A.encode(x, codec), random_tree())
    self.assertEqual(abstract.nbytes, encoded.nbytes)

  @parameterized.parameters('f32', 'bf16')
  def test_spec_is_what_is_encoded(self, codec):
    tree = random_tree()
    encoded = A.encode(tree, codec)
    self.assertEqual(
      A.encoded_spec(tree, codec),
      tuple((x.shape, np.dtype(x.dtype)) for x in encoded.arrays),
    )

  @hypothesis.settings(deadline=None, max_examples=50, derandomize=True)
  @hypothesis.given(st.lists(st.floats(width=32), min_size=8, max_size=8))
  def test_bf16_rounds_to_nearest_even(self, values):
    value = np.float32(values)
    with np.errstate(invalid='ignore'):
      expected = bf16(value)
    encoded = A.encode({'x': value}, 'bf16')
    np.testing.assert_array_equal(A.decode(encoded)['x'], expected)

  def test_bf16_ties_on_the_device(self):
    value = np.float32([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-9, 3e38])
    expected = np.float32([1, 1 + 2**-6, -1, 1, 3e38])
    expected[-1] = bf16(expected[-1])
    encoded = jax.jit(lambda x: A.encode({'x': x}, 'bf16'))(value)
    np.testing.assert_array_equal(A.decode(encoded)['x'], expected)

  def test_unknown_codec(self):
    with self.assertRaisesRegex(ValueError, "'zip', expected one of f32, bf16"):
      A.encode(random_tree(), 'zip')
    with self.assertRaisesRegex(ValueError, "'zip'"):
      A.encoded_spec(random_tree(), 'zip')


class BuffersTest(parameterized.TestCase):
  @parameterized.parameters('f32', 'bf16')
  def test_round_trip(self, codec):
    encoded = A.encode(jax.tree.map(jnp.asarray, random_tree()), codec)
    buffers = A.to_buffers(encoded)
    for buffer in buffers:
      self.assertEqual((buffer.dtype, buffer.ndim), (np.uint8, 1))
    back = A.from_buffers(random_tree(1), codec, buffers)
    self.assertEqual(back.names, encoded.names)
    self.assertEqual(back.shapes, encoded.shapes)
    one, two = A.decode(encoded), A.decode(back)
    for name in SHAPES:
      np.testing.assert_array_equal(one[name], two[name])

  def test_views_of_one_receive_buffer(self):
    """As they arrive: behind each other, at any offset."""
    buffers = A.to_buffers(A.encode(random_tree(), 'f32'))
    received = np.frombuffer(b'\0' + b''.join(buffers), np.uint8)
    parts, at = [], 1
    for buffer in buffers:
      parts.append(received[at : at + buffer.size])
      at += buffer.size
    decoded = A.decode(A.from_buffers(random_tree(), 'f32', parts))
    for name, value in random_tree().items():
      np.testing.assert_array_equal(decoded[name], value)

  def test_bytes_are_little_endian_values(self):
    tree = {'x': np.float32([1.0, -2.0])}
    (f32,) = A.to_buffers(A.encode(tree, 'f32'))
    (half,) = A.to_buffers(A.encode(tree, 'bf16'))
    self.assertEqual(f32.tobytes().hex(), '0000803f000000c0')
    self.assertEqual(half.tobytes().hex(), '803f00c0')

  def test_host_arrays_are_not_copied(self):
    tree = {'x': np.arange(6, dtype=np.float32).reshape(2, 3)}
    encoded = A.Encoded((tree['x'],), 'f32', ('x',), ((2, 3),))
    (buffer,) = A.to_buffers(encoded)
    self.assertTrue(np.shares_memory(buffer, tree['x']))
    (array,) = A.from_buffers(tree, 'f32', [buffer]).arrays
    self.assertTrue(np.shares_memory(array, tree['x']))

  @parameterized.parameters('f32', 'bf16')
  def test_hostile(self, codec):
    specs = random_tree()
    good = list(A.to_buffers(A.encode(specs, codec)))
    with self.assertRaisesRegex(ValueError, '4 buffers, expected 5'):
      A.from_buffers(specs, codec, good[:-1])
    with self.assertRaisesRegex(ValueError, '6 buffers, expected 5'):
      A.from_buffers(specs, codec, good + [good[0]])
    with self.assertRaisesRegex(ValueError, '0 buffers'):
      A.from_buffers(specs, codec, [])
    for bad in (
      good[0][:-1],
      good[0][:0],
      np.append(good[0], np.uint8(0)),
      good[0].reshape(1, -1),
      good[0].astype(np.uint16),
      good[0].view(np.int8),
      np.repeat(good[0], 2)[::2],  # not contiguous
    ):
      with (
        self.subTest(bad.dtype, size=bad.size, shape=bad.shape),
        self.assertRaises(ValueError),
      ):
        A.from_buffers(specs, codec, [bad, *good[1:]])
    with self.assertRaisesRegex(ValueError, 'bytes, expected'):
      A.from_buffers(specs, codec, good[::-1])
    with self.assertRaisesRegex(ValueError, "codec 'nope'"):
      A.from_buffers(specs, 'nope', good)

  def test_read_only_bytes_are_enough(self):
    data = np.frombuffer(bytes(range(8)), np.uint8)
    specs = {'x': jax.ShapeDtypeStruct((2,), 'float32')}
    decoded = A.decode(A.from_buffers(specs, 'f32', [data]))
    self.assertEqual(np.asarray(decoded['x']).tobytes(), bytes(range(8)))


if __name__ == '__main__':
  absltest.main()
