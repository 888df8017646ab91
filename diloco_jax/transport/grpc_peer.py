"""What both ends keep of one connection."""

import threading
import time

from diloco_jax.protocol import messages as m
from diloco_jax.transport import base
from diloco_jax.transport import frames
from diloco_jax.transport.grpc_settings import BULK
from diloco_jax.transport.grpc_settings import CONTROL
from diloco_jax.transport.grpc_settings import STREAMS
from diloco_jax.transport.outbox import Outbox

PRIORITIES = (0, 1)


class Peer:
  """An outbox for each stream, and how far the streams are."""

  def __init__(self, name: str, options: base.TransportOptions):
    self.name = name
    self.outboxes = {
      stream: Outbox(options.queue_max, options.inflight_bytes_max)
      for stream in STREAMS
    }
    self.open: set[str] = set()  # streams that are connected
    self.ended: set[str] = set()  # streams that ended as they should
    self.failed = False  # a stream has ended as it should not
    self.gone = False  # nothing of it is delivered any more
    self.reason = ''  # why it ended; a failure counts more than an end
    self.bytes_in = dict.fromkeys(STREAMS, 0)  # each by its own thread
    self.heard_at = time.monotonic()
    # Since when the rest of a message that has begun is waited for.
    self._amid_since: dict[str, float | None] = dict.fromkeys(STREAMS)
    self._options = options

  def send(
    self, message: m.Message, payload: base.Payload | None, priority: int
  ) -> bool:
    if payload is None:
      frame = frames.control_frame(message)
      return self.outboxes[CONTROL].put(iter((frame,)), len(frame), 0)
    if payload.nbytes > self._options.payload_bytes_max:
      return False
    outbox = self.outboxes[BULK]
    pieces = frames.bulk_frames(
      outbox.next_number(), message, payload, self._options.chunk_bytes
    )
    return outbox.put(pieces, payload.nbytes, priority)

  def read(
    self,
    stream: str,
    frame: bytes,
    parser: frames.Parser,
    inbox: base.Inbox,
  ) -> None:
    """Take one frame. Raises FrameError."""
    self.heard_at = time.monotonic()
    self._amid_since[stream] = None
    delivery = parser.feed(frame)
    if not parser.is_ended:
      self.bytes_in[stream] += len(frame)
    if delivery is not None:
      payload = delivery.payload
      nbytes = len(frame) if payload is None else payload.nbytes
      inbox.put_message(delivery, nbytes, lambda: self.gone)
      self.heard_at = time.monotonic()
    if parser.is_amid:
      self._amid_since[stream] = time.monotonic()

  @property
  def over(self) -> bool:
    """Nothing more comes."""
    return self.failed or len(self.ended) == len(STREAMS)

  def trouble(self) -> str:
    """Why this connection should be given up now, or ''."""
    limit_s = self._options.deadline_s
    if max(x.stalled_s() for x in self.outboxes.values()) > limit_s:
      return 'does not take what is sent'
    for since in self._amid_since.values():
      if since is not None and time.monotonic() - since > limit_s:
        return 'does not go on with a message'
    half = self.ended and len(self.ended) < len(STREAMS)
    if half and time.monotonic() - self.heard_at > limit_s:
      return 'only half a connection is left'
    return ''

  def end(self) -> None:
    """Close after what is queued."""
    for outbox in self.outboxes.values():
      outbox.end(frames.end_frame())

  def close(self) -> None:
    """Close at once."""
    for outbox in self.outboxes.values():
      outbox.close()

  def traffic(self) -> base.Traffic:
    return base.Traffic(
      sum(self.bytes_in.values()),
      sum(x.bytes_out for x in self.outboxes.values()),
    )


def check(
  message: m.Message,
  payload: base.Payload | None,
  priority: int,
  allowed: tuple[type, ...],
) -> None:
  """Raises ValueError where a message may not be sent to anybody."""
  if not isinstance(message, allowed):
    raise ValueError(f'{type(message).__name__} goes the other way')
  if priority not in PRIORITIES:
    raise ValueError(f'priority {priority}, expected one of {PRIORITIES}')
  base.check_payload(message, payload)


def add(a: base.Traffic, b: base.Traffic) -> base.Traffic:
  return base.Traffic(a.bytes_in + b.bytes_in, a.bytes_out + b.bytes_out)


def start(name: str, target: object, *args: object) -> threading.Thread:
  """A thread that does not keep the process from ending."""
  thread = threading.Thread(
    target=target,  # type: ignore[arg-type]
    args=args,
    name=name,
    daemon=True,
  )
  thread.start()
  return thread
