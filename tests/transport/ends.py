"""Both transports behind one way to start them, and waiting for what comes."""

import random
import threading
import uuid

import grpc as grpc_library
import numpy as np

from diloco_jax.protocol import messages as m
from diloco_jax.transport import base
from diloco_jax.transport import grpc
from diloco_jax.transport import inprocess

TOKEN = 'right token'
TIMEOUT_S = 60.0  # nothing takes so long; a test that waits so long has failed


class InProcess:
  """Threads of one process."""

  def __init__(self, options=None):
    self._hub = inprocess.Hub(TOKEN, options)
    self.server = self._hub.server()

  def connect(self, token=TOKEN):
    return self._hub.connect(token)


class Grpc:
  """Two streams on loopback."""

  def __init__(self, options=None):
    self.options = options
    self.server = grpc.serve('127.0.0.1:0', TOKEN, options)

  def connect(self, token=TOKEN, options=None):
    return connect(self.server.address, token, options or self.options)


def connect(address, token=TOKEN, options=None):
  return grpc.connect(address, token, options, rng=random.Random(0))


class RawClient:
  """Two streams that send whatever they are told, and read what they like."""

  def __init__(
    self,
    address,
    metadata=None,
    streams=('control', 'bulk'),
    credentials=None,
  ):
    if metadata is None:
      metadata = (('token-bin', TOKEN.encode()), ('session', uuid.uuid4().hex))
    self._open = threading.Event()
    self.calls = {}
    self._channels = []
    self._outboxes = {}
    for stream in streams:
      options = [('grpc.use_local_subchannel_pool', 1)]
      if credentials is None:
        channel = grpc_library.insecure_channel(address, options)
      else:
        channel = grpc_library.secure_channel(address, credentials, options)
      self._channels.append(channel)
      outbox = _Frames()
      self._outboxes[stream] = outbox
      method = channel.stream_stream(f'/diloco_jax.Exchange/{stream}')
      self.calls[stream] = method(outbox, metadata=metadata)

  def send(self, stream, frame):
    self._outboxes[stream].put(frame)

  def close(self):
    for outbox in self._outboxes.values():
      outbox.put(None)
    for call in self.calls.values():
      call.cancel()
    for channel in self._channels:
      channel.close()


class _Frames:
  """An iterator that ends at None."""

  def __init__(self):
    self._items = []
    self._changed = threading.Condition()

  def put(self, item):
    with self._changed:
      self._items.append(item)
      self._changed.notify_all()

  def __iter__(self):
    return self

  def __next__(self):
    with self._changed:
      self._changed.wait_for(lambda: self._items)
      item = self._items.pop(0)
      if item is None:
        raise StopIteration
      return item


def receive_until(endpoint, enough):
  """Everything received until `enough(items)` is true."""
  items = []
  while not enough(items):
    new = endpoint.receive(TIMEOUT_S)
    assert new, f'nothing came after {items}'
    items.extend(new)
  return items


def one(endpoint, kind):
  """All that came up to the first of a kind, which it returns."""
  items = receive_until(
    endpoint, lambda items: any(isinstance(x, kind) for x in items)
  )
  return next(x for x in items if isinstance(x, kind))


def deliveries(endpoint, count):
  """The next deliveries, and nothing else may come."""
  items = receive_until(endpoint, lambda items: len(items) >= count)
  assert all(isinstance(x, base.Delivery) for x in items), items
  assert len(items) == count, items
  return items


def in_thread(function):
  """Run it; a test fails where it does not return."""
  thread = threading.Thread(target=function, daemon=True)
  thread.start()
  thread.join(TIMEOUT_S)
  assert not thread.is_alive(), f'{function} does not return'


def report(seq=0, **fields):
  """An island's control message."""
  return m.Report(
    island=0,
    incarnation=1,
    seq=seq,
    step=seq,
    tokens=seq,
    step_time_s=0.5,
    versions=(m.Version(1, 2),),
    **fields,
  )


def closed(slot=0):
  """A syncer's control message."""
  return m.Closed(island=0, incarnation=1, slot=slot)


def contribution(fragment=0):
  """An island's message with a payload."""
  return m.Contribution(
    island=0,
    incarnation=1,
    round=m.RoundId(1, 2),
    fragment=fragment,
    capture=m.CaptureId(1, 3),
    base=m.Version(1, 4),
    c_steps=5,
    c_tokens=6,
    held_s=0.25,
    encode_s=0.125,
    fingerprint='abc',
  )


def broadcast(fragment=0):
  """A syncer's message with a payload."""
  return m.Broadcast(
    island=0,
    incarnation=1,
    syncer_incarnation=1,
    fragment=fragment,
    version=m.Version(1, 2),
    round=None,
    slot=-1,
    digest='0' * 32,
    named=None,
    global_step=7,
  )


def payload(*sizes, seed=0):
  """Buffers of random bytes."""
  rng = np.random.default_rng(seed)
  return base.Payload(
    'f32', tuple(rng.integers(0, 256, n, np.uint8) for n in sizes)
  )


def as_bytes(x):
  return (x.kind, [buffer.tobytes() for buffer in x.buffers])
