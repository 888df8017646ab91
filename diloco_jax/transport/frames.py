"""Frames: how a message and its payload are cut for the wire, and checked.

A frame is a header and a body. Control: one frame, the message as JSON. Bulk:
a head frame (the message, the codec and the lengths of the buffers as JSON),
then chunks of the buffers' bytes, one after the other. Chunks name their
message, so that one of a higher priority may pass between them. A stream that
is closed ends with a frame that says so, as gRPC does not tell a server whether
a client has closed it or is gone.

Everything that is read here comes from outside and is hostile until checked.
"""

from collections.abc import Iterator
import itertools
import json
import struct
import threading
from typing import Any
import weakref

import numpy as np
import xxhash

from diloco_jax.protocol import messages as m
from diloco_jax.protocol import records
from diloco_jax.transport.base import BUFFERS_MAX
from diloco_jax.transport.base import KIND_MAX
from diloco_jax.transport.base import Delivery
from diloco_jax.transport.base import Payload

MAGIC = b'DiLo'
WIRE_VERSION = 1
CONTROL, HEAD, CHUNK, END = 1, 2, 3, 4
# magic, wire version, kind, spare, message number, body length, checksum
HEADER = struct.Struct('<4sBBHIIQ')
CONTROL_BYTES_MAX = 1 << 20
CHUNK_BYTES_MAX = 1 << 24
ALIGNMENT = 64  # bytes; XLA on CPUs takes such an array as it is
PARTIAL_MAX = 4  # messages of one stream that have begun and not ended


class FrameError(ValueError):
  """A frame that nobody who speaks this protocol would send."""


def _frame(kind: int, number: int, *parts: Any) -> bytes:
  """Header and body in one copy."""
  digest = xxhash.xxh3_64()
  length = 0
  for part in parts:
    digest.update(part)
    length += len(part)
  header = HEADER.pack(
    MAGIC, WIRE_VERSION, kind, 0, number, length, digest.intdigest()
  )
  return b''.join((header, *parts))


def _json(value: Any) -> bytes:
  text = records.to_json(value).encode()
  if len(text) > CONTROL_BYTES_MAX:
    raise ValueError(f'{len(text)} bytes of JSON, at most {CONTROL_BYTES_MAX}')
  return text


def control_frame(message: m.Message) -> bytes:
  """A message without payload.

  Raises:
    ValueError: it holds a number that is not finite, or is too large.
  """
  return _frame(CONTROL, 0, _json(message))


def bulk_frames(
  number: int, message: m.Message, payload: Payload, chunk_bytes: int
) -> Iterator[bytes]:
  """A message with its payload; chunks are made as they are asked for.

  Raises:
    ValueError: at once, as `control_frame`.
  """
  head = {
    'message': message,
    'kind': payload.kind,
    'lengths': [int(x.nbytes) for x in payload.buffers],
  }
  first = _frame(HEAD, number, _json(head))
  return itertools.chain((first,), _chunks(number, payload, chunk_bytes))


def _chunks(number: int, payload: Payload, chunk_bytes: int) -> Iterator[bytes]:
  chunk_bytes = min(chunk_bytes, CHUNK_BYTES_MAX)
  parts: list[memoryview] = []
  room = chunk_bytes
  for buffer in payload.buffers:
    view = memoryview(buffer)
    while len(view):
      parts.append(view[:room])
      view = view[len(parts[-1]) :]
      room -= len(parts[-1])
      if room == 0:
        yield _frame(CHUNK, number, *parts)
        parts, room = [], chunk_bytes
  if parts:
    yield _frame(CHUNK, number, *parts)


def end_frame() -> bytes:
  """Nothing comes after it."""
  return _frame(END, 0)


def _refuse_constant(name: str) -> Any:
  raise FrameError(f'{name} is not a number here')


def _parse_json(body: memoryview) -> Any:
  if len(body) > CONTROL_BYTES_MAX:
    raise FrameError(f'{len(body)} bytes of JSON')
  data = bytes(body)
  try:
    value = json.loads(data, parse_constant=_refuse_constant)
    if b'\\u' in data:
      # A half of a surrogate pair would be a text that no file takes.
      json.dumps(value, ensure_ascii=False).encode()
  except FrameError:
    raise
  except (ValueError, RecursionError) as e:
    raise FrameError(f'not JSON: {str(e)[:80]}') from e
  return value


def _keep_freed_memory() -> None:
  """Make glibc keep what is freed, for the frames that come next.

  At first it gives blocks of a frame's size back to the system, which costs a
  page fault for every page of every frame: about a tenth of the CPU time of
  a transfer. It stops once a larger block has been freed, up to 32 MiB. Nothing
  is written, so no page of this one is ever touched.
  """
  bytes(31 << 20)


class Pool:
  """Receive buffers, used again when nobody holds a view of them.

  Fresh memory costs a page fault for every page; large NumPy buffers that are
  used again do not.
  """

  def __init__(self, keep: int = 8):
    _keep_freed_memory()
    self._keep = keep
    # The memory, and the array that was last handed out over it. All that
    # derives from that array keeps it alive: slices, `np.frombuffer`, arrays
    # that JAX made without a copy. The memoryview between the two stops NumPy
    # from letting slices refer to the memory directly.
    self._slots: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []
    self._lock = threading.Lock()

  def take(self, nbytes: int) -> np.ndarray:
    """[nbytes] uint8 of undefined content, aligned."""
    with self._lock:
      memory = self._free(nbytes)
      if memory is None:
        memory = np.empty(nbytes + ALIGNMENT, np.uint8)
      begin = -memory.ctypes.data % ALIGNMENT
      taken = np.frombuffer(memoryview(memory), np.uint8, nbytes, begin)
      self._slots.append((memory, weakref.ref(taken)))
      del self._slots[: -self._keep]
      return taken

  def _free(self, nbytes: int) -> np.ndarray | None:
    for k, (memory, handed_out) in enumerate(self._slots):
      fits = nbytes <= memory.nbytes <= 2 * nbytes + 4096
      if fits and handed_out() is None:
        del self._slots[k]
        return memory
    return None


class _Partial:
  """A bulk message that is arriving."""

  def __init__(
    self, message: m.Message, kind: str, lengths: list[int], pool: Pool
  ):
    self.message = message
    self.kind = kind
    self.lengths = lengths
    self.buffer = pool.take(sum(lengths))
    self.filled = 0

  def payload(self) -> Payload:
    views = []
    start = 0
    for length in self.lengths:
      views.append(self.buffer[start : start + length])
      start += length
    return Payload(self.kind, tuple(views))


class Parser:
  """The reading end of one stream of one peer."""

  def __init__(
    self,
    peer: str,
    allowed: tuple[type, ...],
    message_bytes_max: int,
    pool: Pool,
  ):
    self._peer = peer
    self._allowed = allowed
    self._message_bytes_max = message_bytes_max
    self._pool = pool
    self._partial: dict[int, _Partial] = {}
    self.is_ended = False

  @property
  def is_amid(self) -> bool:
    """Whether a message has begun and not ended."""
    return bool(self._partial)

  def feed(self, frame: bytes) -> Delivery | None:
    """The message that this frame completes, if any.

    Raises:
      FrameError: the peer does not keep to the protocol; drop it.
    """
    if len(frame) < HEADER.size:
      raise FrameError(f'{len(frame)} bytes are no frame')
    magic, version, kind, _, number, length, checksum = HEADER.unpack_from(
      frame
    )
    if magic != MAGIC:
      raise FrameError('not a frame of this protocol')
    if version != WIRE_VERSION:
      raise FrameError(f'wire version {version}, expected {WIRE_VERSION}')
    body = memoryview(frame)[HEADER.size :]
    if length != len(body):
      raise FrameError(f'{len(body)} bytes, announced {length}')
    if xxhash.xxh3_64_intdigest(body) != checksum:
      raise FrameError('wrong checksum')
    if self.is_ended:
      raise FrameError('a frame after the end')
    if kind == END:
      if body or self._partial:
        raise FrameError('an end amid a message')
      self.is_ended = True
      return None
    if kind == CONTROL:
      message = self._message(_parse_json(body))
      if isinstance(message, m.BULK):
        raise FrameError(f'{type(message).__name__} without its payload')
      return Delivery(self._peer, message, None)
    if kind == HEAD:
      return self._begin(number, _parse_json(body))
    if kind == CHUNK:
      return self._fill(number, body)
    raise FrameError(f'unknown kind {kind}')

  def _message(self, plain: Any) -> m.Message:
    try:
      message = records.message_from_plain(plain)
    except (records.MalformedError, OverflowError) as e:
      raise FrameError(str(e)) from e
    if not isinstance(message, self._allowed):
      raise FrameError(f'{type(message).__name__} goes the other way')
    return message

  def _begin(self, number: int, head: Any) -> Delivery | None:
    if not isinstance(head, dict) or head.keys() != {
      'message', 'kind', 'lengths',
    }:  # fmt: skip
      raise FrameError('not a head')
    message = self._message(head['message'])
    if not isinstance(message, m.BULK):
      raise FrameError(f'{type(message).__name__} with a payload')
    kind, lengths = head['kind'], head['lengths']
    if not isinstance(kind, str) or len(kind) > KIND_MAX:
      raise FrameError('no name of a codec')
    if not isinstance(lengths, list) or len(lengths) > BUFFERS_MAX:
      raise FrameError('no list of lengths')
    if not all(type(x) is int and x >= 0 for x in lengths):
      raise FrameError('lengths are not numbers')
    if sum(lengths) > self._message_bytes_max:
      raise FrameError(
        f'{sum(lengths)} bytes, at most {self._message_bytes_max}'
      )
    if number in self._partial or len(self._partial) >= PARTIAL_MAX:
      raise FrameError('too many messages at once')
    partial = _Partial(message, kind, lengths, self._pool)
    if not sum(lengths):
      return Delivery(self._peer, message, partial.payload())
    self._partial[number] = partial
    return None

  def _fill(self, number: int, body: memoryview) -> Delivery | None:
    partial = self._partial.get(number)
    if partial is None:
      raise FrameError('a chunk of nothing')
    stop = partial.filled + len(body)
    if not len(body) or stop > len(partial.buffer):
      raise FrameError('a chunk that does not fit')
    partial.buffer[partial.filled : stop] = np.frombuffer(body, np.uint8)
    partial.filled = stop
    if stop < len(partial.buffer):
      return None
    del self._partial[number]
    return Delivery(self._peer, partial.message, partial.payload())
