"""Codecs: how a fragment looks on the wire."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

Spec = tuple[tuple[int, ...], np.dtype]  # shape and dtype of one array
Specs = Mapping[str, Any]  # name -> something with a shape


class Codec(NamedTuple):
  """One way to write a tensor as arrays."""

  encode: Callable[[jax.Array], tuple[jax.Array, ...]]
  decode: Callable[[Sequence[jax.Array], tuple[int, ...]], jax.Array]
  spec: Callable[[tuple[int, ...]], tuple[Spec, ...]]  # arrays of a shape


def _cast(dtype: Any) -> Codec:
  """A codec that only changes the dtype."""
  return Codec(
    encode=lambda x: (x.astype(dtype),),
    decode=lambda arrays, shape: (
      arrays[0].astype(jnp.float32, copy=False).reshape(shape)
    ),
    spec=lambda shape: ((shape, np.dtype(dtype)),),
  )


CODECS = {
  'f32': _cast(np.float32),
  'bf16': _cast(ml_dtypes.bfloat16),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Encoded:
  """An encoded fragment: a pytree whose arrays are what travels."""

  arrays: tuple[Any, ...]
  codec: str = dataclasses.field(metadata={'static': True})
  names: tuple[str, ...] = dataclasses.field(metadata={'static': True})
  shapes: tuple[tuple[int, ...], ...] = dataclasses.field(
    metadata={'static': True}
  )

  @property
  def nbytes(self) -> int:
    """Bytes on the wire, without the header."""
    return sum(
      math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in self.arrays
    )


def _codec(name: str) -> Codec:
  if name not in CODECS:
    raise ValueError(f'codec {name!r}, expected one of {", ".join(CODECS)}')
  return CODECS[name]


def encode(tree: Mapping[str, Any], codec: str) -> Encoded:
  """Encode a fragment.

  Args:
    tree: name -> float array of any rank.
    codec: f32 or bf16.

  Raises:
    ValueError: an unknown codec.
  """
  how = _codec(codec)
  names = tuple(sorted(tree))
  arrays: list[Any] = []
  for name in names:
    arrays.extend(how.encode(tree[name]))
  return Encoded(
    arrays=tuple(arrays),
    codec=codec,
    names=names,
    shapes=tuple(tuple(tree[name].shape) for name in names),
  )


def decode(encoded: Encoded) -> dict[str, Any]:
  """The fragment, name -> f32 array; f32 on the host is not copied."""
  how = _codec(encoded.codec)
  tree = {}
  position = 0
  for name, shape in zip(encoded.names, encoded.shapes, strict=True):
    count = len(how.spec(shape))
    part = encoded.arrays[position : position + count]
    tree[name] = how.decode(part, shape)
    position += count
  return tree


def encoded_spec(specs: Specs, codec: str) -> tuple[Spec, ...]:
  """Shapes and dtypes of the arrays that an encoded fragment has."""
  how = _codec(codec)
  return tuple(
    spec for name in sorted(specs) for spec in how.spec(specs[name].shape)
  )


def to_buffers(encoded: Encoded) -> tuple[np.ndarray, ...]:
  """The bytes of each array; views where the array is on the host."""
  return tuple(
    np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in encoded.arrays
  )


def from_buffers(
  specs: Specs, codec: str, buffers: Sequence[np.ndarray]
) -> Encoded:
  """The inverse of `to_buffers`, for bytes that came from outside.

  Args:
    specs: name -> shape, what the fragment must be.
    codec: that it must be in.
    buffers: [bytes] uint8 each.

  Raises:
    ValueError: a number of buffers or a length that does not fit.
  """
  expected = encoded_spec(specs, codec)
  if len(buffers) != len(expected):
    raise ValueError(f'{len(buffers)} buffers, expected {len(expected)}')
  arrays = []
  for buffer, (shape, dtype) in zip(buffers, expected, strict=True):
    nbytes = math.prod(shape) * dtype.itemsize
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or buffer.size != nbytes:
      raise ValueError(f'a buffer of {buffer.nbytes} bytes, expected {nbytes}')
    if buffer.ctypes.data % dtype.itemsize:
      buffer = buffer.copy()  # views of a wider dtype must be aligned
    arrays.append(buffer.view(dtype).reshape(shape))
  names = tuple(sorted(specs))
  return Encoded(
    arrays=tuple(arrays),
    codec=codec,
    names=names,
    shapes=tuple(tuple(specs[name].shape) for name in names),
  )
